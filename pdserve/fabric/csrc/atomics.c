#include "api.h"

#include <stdatomic.h>

/* Words in memory that another process maps. The address is 8-byte aligned (checked by the caller), where a
 * 64-bit atomic is lock-free on every platform this runs on: a lock would live in this process alone. */

_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2, "64-bit atomics must be lock-free to be shared between processes");

void pd_store_release(void *address, uint64_t value) {
    atomic_store_explicit((_Atomic uint64_t *)address, value, memory_order_release);
}

uint64_t pd_load_acquire(const void *address) {
    return atomic_load_explicit((const _Atomic uint64_t *)address, memory_order_acquire);
}
