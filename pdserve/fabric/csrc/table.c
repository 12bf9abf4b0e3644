#include "core.h"

#include <string.h>

/* Facts of a table of runs, computed once: with them a later post is bounds-checked in constant time. Returns 0,
 * or with *bad_row set: -1 length is 0, -2 src + length overflows, -3 dst + length overflows, -4 imm is neither
 * 32 bits nor none, -5 the sum of lengths overflows. */
int pd_table_scan(const pd_row *rows, size_t count, pd_extent *out, size_t *bad_row) {
    pd_extent e;
    memset(&e, 0, sizeof e);
    for (size_t i = 0; i < count; i++) {
        const pd_row *row = &rows[i];
        uint64_t end;
        *bad_row = i;
        if (!row->length)
            return -1;
        if (__builtin_add_overflow(row->src, row->length, &end))
            return -2;
        if (end > e.src_end)
            e.src_end = end;
        if (__builtin_add_overflow(row->dst, row->length, &end))
            return -3;
        if (end > e.dst_end)
            e.dst_end = end;
        if (row->imm != PD_NO_IMM && row->imm > UINT32_MAX)
            return -4;
        if (__builtin_add_overflow(e.bytes, row->length, &e.bytes))
            return -5;
        if (row->length > e.max_length)
            e.max_length = row->length;
        e.runs += row->imm == PD_NO_IMM ? 0 : (row->imm & 0xffu) + 1;
    }
    *out = e;
    return 0;
}
