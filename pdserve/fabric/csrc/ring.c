#include "core.h"

#include <stdlib.h>

int pd_ring_init(struct pd_ring *ring, uint32_t size) {
    ring->size = 1;
    while (ring->size < size)
        ring->size <<= 1;
    ring->mask = ring->size - 1;
    ring->records = calloc(ring->size, sizeof(pd_record)); /* untouched pages cost nothing */
    return ring->records ? 0 : -FI_ENOMEM;
}

int pd_ring_reserve(struct pd_ring *ring, uint64_t places) {
    if (places > ring->size - ring->reserved)
        return -FI_ENOSPC;
    ring->reserved += places;
    return 0;
}

void pd_ring_unreserve(struct pd_ring *ring, uint64_t places) {
    ring->reserved -= places;
}

void pd_ring_push(struct pd_ring *ring, const pd_record *record) {
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    ring->records[head & ring->mask] = *record;
    atomic_store_explicit(&ring->head, head + 1, memory_order_release);
}

int pd_ring_take(struct pd_ring *ring, pd_record *out, int max) {
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_acquire);
    int n = 0;
    for (; tail != head && n < max; tail++)
        out[n++] = ring->records[tail & ring->mask];
    atomic_store_explicit(&ring->tail, tail, memory_order_release);
    return n;
}
