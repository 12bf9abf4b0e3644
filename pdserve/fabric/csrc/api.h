#ifndef PDSERVE_FABRIC_API_H
#define PDSERVE_FABRIC_API_H

#include <stddef.h>
#include <stdint.h>

/* The face of the C core. What stands between the markers is also read by cffi, so it keeps to plain
 * declarations. Functions return 0 (or a count) or a negative libfabric error code. Unless said otherwise they
 * are called by one thread, the one that owns the fabric (the event loop's). */

/* cdef: begin */

/* ---- words shared with other processes (atomics.c) ---- */
void pd_store_release(void *address, uint64_t value);
uint64_t pd_load_acquire(const void *address);

/* ---- libfabric itself (library.c) ---- */
int pd_library_load(const char *path, char *message, size_t size);
uint32_t pd_library_version(void);
const char *pd_strerror(int code);
typedef struct {
    char provider[64], fabric[64], domain[64];
    uint32_t endpoint, version;         /* FI_EP_MSG 1, FI_EP_DGRAM 2, FI_EP_RDM 3; the provider's own version */
    uint64_t capabilities, cq_data_size;
} pd_offer;
int pd_library_offers(pd_offer *out, int max);

/* ---- live native objects of this process (handles.c) ---- */
typedef struct {
    int64_t fabrics, domains, endpoints, regions, completion_queues, address_vectors, ports, operations;
} pd_handles;
void pd_handles_read(pd_handles *out);

/* ---- immediates (counters.c): slot:12 | generation:12 | runs-1:8 ---- */
typedef struct pd_counters pd_counters;
typedef struct {
    uint64_t ns;          /* CLOCK_MONOTONIC of the last immediate counted */
    uint32_t slot, generation, count, expected;
} pd_count;
pd_counters *pd_counters_new(void);
void pd_counters_free(pd_counters *counters);
void pd_counters_arm(pd_counters *counters, uint32_t slot, uint32_t generation, uint32_t expected);
uint32_t pd_counters_disarm(pd_counters *counters, uint32_t slot);
void pd_counters_read(pd_counters *counters, uint32_t slot, pd_count *out);
void pd_counters_want_progress(pd_counters *counters, int want);
uint64_t pd_counters_stale(pd_counters *counters);
int pd_counters_collect(pd_counters *counters, pd_count *out, int max);
int pd_counters_add(pd_counters *counters, uint32_t imm, uint64_t ns);

/* ---- tables of runs (table.c) ---- */
typedef struct {
    uint64_t src, dst, length, imm;     /* imm: 32 bits, or 2**64-1 for none */
} pd_row;
typedef struct {
    uint64_t bytes, runs, max_length, src_end, dst_end;
} pd_extent;
int pd_table_scan(const pd_row *rows, size_t count, pd_extent *out, size_t *bad_row);

/* ---- fabrics (fabric.c) ---- */
typedef struct {
    const char *provider, *host;
    uint32_t recv_buffers, recv_size, max_inflight_writes, max_inflight_sends, cq_size, ring_size;
    uint32_t post_quantum, drain_quantum;
    uint64_t dead_after_ns;             /* EAGAIN for this long with nothing in flight: the peer is gone */
    int threaded, cpu;                  /* cpu: where to pin the thread, or -1 */
} pd_config;
typedef struct {
    char provider[64], fabric[64], domain[64];
    uint64_t mr_mode, max_message, cq_data_size, max_key_size;
    uint32_t api_version, address_format;
} pd_info;
typedef struct {
    int code;
    char action[64];
} pd_failure;
typedef struct {
    uint64_t passes, sleeps, timeouts, pokes, records, commands, ports, outstanding, ring_size;
} pd_pump_statistics;
typedef struct {
    uint32_t kind, port;
    int32_t error, provider_error;      /* positive codes */
    uint64_t token, value, started_ns, ended_ns;
} pd_record;
#define PD_SENT 1
#define PD_WRITTEN 2
#define PD_RECEIVED 3
#define PD_LOST 4
#define PD_CLOSED 5
#define PD_MORE 1
#define PD_PENDING 2
typedef struct pd_fabric pd_fabric;
pd_fabric *pd_fabric_open(const pd_config *config, pd_info *info, pd_failure *failure);
int pd_fabric_close(pd_fabric *fabric);
int pd_fabric_fd(pd_fabric *fabric);
int pd_fabric_pass(pd_fabric *fabric);
int pd_fabric_arm(pd_fabric *fabric);
void pd_fabric_retry(pd_fabric *fabric);
void pd_fabric_reset(pd_fabric *fabric);
int pd_fabric_take(pd_fabric *fabric, pd_record *out, int max);
void pd_fabric_barrier(pd_fabric *fabric);
void pd_fabric_statistics(pd_fabric *fabric, pd_pump_statistics *out);

/* ---- ports (port.c) ---- */
typedef struct pd_port pd_port;
typedef struct pd_region pd_region;
typedef struct {
    uint64_t writes_posted, writes_completed, bytes_posted, sends_posted, sends_completed, received, received_bytes;
    uint64_t imms, eagain, cq_errors;
    uint64_t queued_batches, queued_sends, inflight_writes, inflight_sends;
} pd_port_statistics;
pd_port *pd_port_open(pd_fabric *fabric, uint32_t id, pd_counters *counters, pd_failure *failure);
int pd_port_address(pd_port *port, void *out, size_t *length);
int pd_port_connect(pd_port *port, const void *address);
int pd_port_close_begin(pd_port *port);
int pd_port_close_now(pd_port *port);
void pd_port_free(pd_port *port);
void pd_port_read_statistics(pd_port *port, pd_port_statistics *out);
const void *pd_port_received(pd_port *port, uint32_t index);
void pd_port_repost(pd_port *port, uint32_t index);
int pd_port_send(pd_port *port, const void *data, size_t length, uint64_t token);
int pd_port_write(pd_port *port, pd_region *region, const pd_row *rows, size_t count, uint64_t src_shift,
                  uint64_t remote_base, uint64_t remote_key, uint64_t dst_shift, uint64_t token);
pd_region *pd_region_open(pd_port *port, void *address, size_t length, uint64_t key, pd_failure *failure);
uint64_t pd_region_key(pd_region *region);
uint64_t pd_region_base(pd_region *region);
int pd_region_close(pd_region *region);

/* cdef: end */

#endif
