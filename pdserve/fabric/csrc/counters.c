#include "core.h"

#include <stdlib.h>
#include <string.h>

/* Counts of immediates, by slot. The pump adds; the owner arms, disarms and collects. No lock: a slot's whole
 * state is one word, changed by compare-and-swap.
 *
 *   word   | armed:1 | unused:19 | generation:12 | count:32 |
 *
 * The owner learns of changes through one bit a slot, so counts are summed here however many writes arrive, and
 * there is no queue that could overflow. */

#define ARMED (UINT64_C(1) << 63)
#define GENERATION(word) ((uint32_t)((word) >> 32) & 0xfffu)
#define COUNT(word) ((uint32_t)(word))

struct pd_counters {
    _Atomic uint64_t words[PD_SLOTS];
    _Atomic uint64_t last_ns[PD_SLOTS];
    _Atomic uint32_t expected[PD_SLOTS];
    _Atomic uint64_t changed[PD_SLOTS / 64];
    _Atomic uint64_t stale;
    _Atomic int progress;
};

pd_counters *pd_counters_new(void) {
    return calloc(1, sizeof(pd_counters));
}

void pd_counters_free(pd_counters *counters) {
    free(counters);
}

void pd_counters_arm(pd_counters *counters, uint32_t slot, uint32_t generation, uint32_t expected) {
    atomic_store(&counters->expected[slot], expected);
    atomic_store(&counters->last_ns[slot], 0);
    atomic_store(&counters->words[slot], ARMED | (uint64_t)generation << 32);
}

uint32_t pd_counters_disarm(pd_counters *counters, uint32_t slot) {
    return COUNT(atomic_exchange(&counters->words[slot], 0));
}

void pd_counters_read(pd_counters *counters, uint32_t slot, pd_count *out) {
    uint64_t word = atomic_load(&counters->words[slot]);
    out->slot = slot;
    out->generation = GENERATION(word);
    out->count = COUNT(word);
    out->expected = atomic_load(&counters->expected[slot]);
    out->ns = atomic_load(&counters->last_ns[slot]);
}

void pd_counters_want_progress(pd_counters *counters, int want) {
    atomic_store(&counters->progress, want);
}

uint64_t pd_counters_stale(pd_counters *counters) {
    return atomic_load(&counters->stale);
}

/* Count one immediate. Returns 1 when the owner has something to hear: the slot is complete, has overshot, or
 * progress is wanted. The data a write brought is in memory before its immediate is reported, and the owner
 * loads the word after this store: what it then reads is the data. */
int pd_counters_add(pd_counters *counters, uint32_t imm, uint64_t ns) {
    uint32_t slot = imm >> 20, generation = imm >> 8 & 0xfffu, runs = (imm & 0xffu) + 1;
    _Atomic uint64_t *cell = &counters->words[slot];
    uint64_t word = atomic_load(cell);
    uint32_t before, after;
    do {
        if (!(word & ARMED) || GENERATION(word) != generation) {
            atomic_fetch_add(&counters->stale, 1);
            return 0;
        }
        before = COUNT(word);
        after = before > UINT32_MAX - runs ? UINT32_MAX : before + runs; /* a hostile peer must not wrap it */
        atomic_store_explicit(&counters->last_ns[slot], ns, memory_order_relaxed);
    } while (!atomic_compare_exchange_weak(cell, &word, (word & ~(uint64_t)UINT32_MAX) | after));
    uint32_t expected = atomic_load(&counters->expected[slot]);
    bool tell = (before < expected && after >= expected) || (before <= expected && after > expected);
    if (!tell && !atomic_load_explicit(&counters->progress, memory_order_relaxed))
        return 0;
    atomic_fetch_or(&counters->changed[slot / 64], UINT64_C(1) << slot % 64);
    return 1;
}

/* Up to `max` changed slots with their counts now. Returns how many; call again while it returns `max`. */
int pd_counters_collect(pd_counters *counters, pd_count *out, int max) {
    int found = 0;
    for (uint32_t group = 0; group < PD_SLOTS / 64; group++) {
        if (!atomic_load_explicit(&counters->changed[group], memory_order_relaxed))
            continue;
        uint64_t bits = atomic_exchange(&counters->changed[group], 0);
        for (; bits; bits &= bits - 1) {
            if (found == max) { /* put back what doesn't fit */
                atomic_fetch_or(&counters->changed[group], bits);
                return found;
            }
            pd_counters_read(counters, group * 64 + (uint32_t)__builtin_ctzll(bits), &out[found++]);
        }
    }
    return found;
}
