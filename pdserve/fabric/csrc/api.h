#ifndef PDSERVE_FABRIC_API_H
#define PDSERVE_FABRIC_API_H

#include <stdint.h>

/* The face of the C core. What stands between the markers is also read by cffi, so it keeps to plain
 * declarations. */

/* cdef: begin */
void pd_store_release(void *address, uint64_t value);
uint64_t pd_load_acquire(const void *address);
/* cdef: end */

#endif
