#ifndef PDSERVE_FABRIC_CORE_H
#define PDSERVE_FABRIC_CORE_H

#include "api.h"

#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

/* Inside of the C core.
 *
 * Who touches what: everything that belongs to a port (its libfabric objects, queues, contexts) is touched by
 * the pumping thread alone, from the moment the port is attached until it has been shut down there. The
 * owner's calls reach it as commands. In inline mode owner and pump are one thread and commands run at once.
 * So libfabric needs no locks of its own (FI_THREAD_DOMAIN) and a close can't overlap a CQ read. */

#define PD_NO_IMM UINT64_MAX
#define PD_SLOTS 4096
#define PD_EPOLL_BATCH 64
#define PD_RETRY_MS 20
#define PD_DEAD_TRIES 50

/* Counters with one writer and racy readers: relaxed load + store, no locked instruction. */
#define BUMP(counter, n)                                                                                          \
    atomic_store_explicit(&(counter), atomic_load_explicit(&(counter), memory_order_relaxed) + (n),               \
                          memory_order_relaxed)
#define PEEK(counter) atomic_load_explicit(&(counter), memory_order_relaxed)

static inline uint64_t pd_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* ---- library.c: the six entry points that are not inline ---- */
struct pd_library {
    int (*getinfo)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **);
    void (*freeinfo)(struct fi_info *);
    struct fi_info *(*dupinfo)(const struct fi_info *);
    int (*fabric)(struct fi_fabric_attr *, struct fid_fabric **, void *);
    const char *(*strerror)(int);
    uint32_t (*version)(void);
};
extern struct pd_library pd_lib;

/* ---- handles.c ---- */
struct pd_live {
    _Atomic int64_t fabrics, domains, endpoints, regions, completion_queues, address_vectors, ports, operations;
};
extern struct pd_live pd_live;

/* ---- ring.c: one producer (pump), one consumer (owner). A record's place is reserved by the owner when its
 * operation is created, so the producer can never find the ring full. ---- */
struct pd_ring {
    pd_record *records;
    uint64_t size, mask;
    _Atomic uint64_t head, tail;
    uint64_t reserved; /* owner only */
};
int pd_ring_init(struct pd_ring *ring, uint32_t size);
int pd_ring_reserve(struct pd_ring *ring, uint64_t places);
void pd_ring_unreserve(struct pd_ring *ring, uint64_t places);
void pd_ring_push(struct pd_ring *ring, const pd_record *record);
int pd_ring_take(struct pd_ring *ring, pd_record *out, int max);

/* ---- pump.c ---- */
struct pd_command {
    struct pd_command *next;
    void (*run)(struct pd_command *);
};

struct pd_fabric {
    pd_config config;
    struct fi_info *info;
    struct fid_fabric *fid;
    struct pd_ring ring;

    int epoll_fd;   /* CQ wait fds, and command_fd */
    int command_fd; /* wakes the thread */
    int poke_fd;    /* wakes the owner */
    pthread_t thread;
    bool running;
    _Atomic int sleeping, poked, stop;
    _Atomic int waiting; /* a hint: commands are queued */
    pthread_mutex_t lock; /* guards the command list only */
    struct pd_command *commands, **commands_tail;

    /* pump only */
    struct pd_port *ports;  /* all attached */
    struct pd_port *active; /* touched since their last successful fi_trywait */
    bool dirty;             /* something for the owner since the last poke */
    _Atomic uint64_t passes, sleeps, timeouts, pokes, pushed, ran, attached;
};

void pd_submit(pd_fabric *fabric, struct pd_command *command);
void pd_call(pd_fabric *fabric, void (*function)(void *), void *argument);
int pd_pump_start(pd_fabric *fabric);
void pd_pump_stop(pd_fabric *fabric);
void pd_pump_attach(struct pd_port *port);
void pd_pump_detach(struct pd_port *port);
void pd_pump_activate(struct pd_port *port);
void pd_push(pd_fabric *fabric, const pd_record *record);

/* ---- port.c, transfer.c ---- */

/* A send, or a batch of writes. Lives from the owner's call until its record is pushed; on `live` all the time,
 * on its queue until every run has been posted. */
struct pd_operation {
    struct pd_command command;
    struct pd_operation *next;               /* queue */
    struct pd_operation *live_next, **live_link;
    pd_port *port;
    uint32_t kind; /* PD_SENT or PD_WRITTEN: the record it ends with */
    int error, provider_error;
    uint64_t token, started_ns;
    /* writes */
    const pd_row *rows; /* borrowed from the owner until the record is pushed */
    size_t count, posted, completed;
    const char *src;
    void *desc;
    uint64_t dst, key;
    /* send */
    size_t length;
    unsigned char data[];
};

struct pd_queue {
    struct pd_operation *head, **tail;
};

enum pd_context_kind { PD_CONTEXT_SEND, PD_CONTEXT_WRITE, PD_CONTEXT_RECV };

/* What libfabric hands back. The first member is the provider's scratch space (FI_CONTEXT2). */
struct pd_context {
    struct fi_context2 scratch;
    enum pd_context_kind kind;
    uint32_t index;
    struct pd_operation *operation;
    struct pd_context *next_free;
    struct pd_command command; /* repost */
    pd_port *port;
};

struct pd_region {
    struct fid_mr *fid;
    pd_port *port;
    void *address;
    size_t length;
    uint64_t key, base;
    struct pd_region *next, **link;
};

enum pd_port_state { PD_PORT_OPEN, PD_PORT_IS_LOST, PD_PORT_IS_CLOSED };

struct pd_port {
    pd_fabric *fabric;
    uint32_t id;
    pd_counters *counters;
    struct fi_info *info;
    struct fid_domain *domain;
    struct fid_av *av;
    struct fid_cq *cq;
    struct fid_ep *ep;
    int wait_fd;

    /* pump only */
    enum pd_port_state state;
    int lost_error, lost_provider_error, close_code;
    fi_addr_t peer;
    struct pd_region *regions;
    struct fid_mr *slab_mr; /* where the provider wants local buffers registered (FI_MR_LOCAL) */
    unsigned char *slab;    /* recv buffers, then send buffers */
    struct pd_context *contexts, *free_sends, *free_writes;
    struct pd_queue sends, writes;
    struct pd_operation *live;
    uint64_t refused_since_ns, refused_tries;
    bool blocked; /* something is queued that only a retry will move */
    bool is_active;
    struct pd_port *next_active;
    struct pd_port *next, **link;
    struct pd_command close_command;

    _Atomic uint64_t writes_posted, writes_completed, bytes_posted, sends_posted, sends_completed, received,
        received_bytes, imms, eagain, cq_errors, queued_batches, queued_sends, inflight_writes, inflight_sends;
};

int pd_port_progress(pd_port *port);
int pd_port_post_receive(pd_port *port, uint32_t index);
void pd_port_lose(pd_port *port, int error, int provider_error);
void pd_port_end_operations(pd_port *port, int error);
void pd_queue_push(struct pd_queue *queue, struct pd_operation *operation);

#endif
