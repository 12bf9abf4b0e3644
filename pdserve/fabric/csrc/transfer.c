#include "core.h"

#include <stdlib.h>
#include <string.h>

/* A port's data path: two queues (messages before writes, so a control message never waits behind a thousand
 * pages), caps on what is in flight, and the drain of its CQ. All on the pumping thread but the two functions
 * at the end.
 *
 * Completions may come in any order. An operation ends when all its runs have; after an error nothing more of it
 * is posted, and it ends when what was posted has come back, or at the close: until then the NIC may read its
 * source. */

void pd_queue_push(struct pd_queue *queue, struct pd_operation *operation) {
    operation->next = NULL;
    *queue->tail = operation;
    queue->tail = &operation->next;
}

static void queue_pop(struct pd_queue *queue) {
    struct pd_operation *operation = queue->head;
    if (!(queue->head = operation->next))
        queue->tail = &queue->head;
}

static void finish(struct pd_operation *operation) {
    pd_record record = {.kind = operation->kind,
                        .port = operation->port->id,
                        .error = operation->error,
                        .provider_error = operation->provider_error,
                        .token = operation->token,
                        .value = operation->completed,
                        .started_ns = operation->started_ns,
                        .ended_ns = pd_now_ns()};
    if ((*operation->live_link = operation->live_next))
        operation->live_next->live_link = operation->live_link;
    pd_fabric *fabric = operation->port->fabric;
    free(operation);
    atomic_fetch_sub(&pd_live.operations, 1);
    pd_push(fabric, &record); /* last: from here on the owner may let the table go */
}

static void drop_queue(struct pd_queue *queue, int error, int provider_error) {
    while (queue->head) {
        struct pd_operation *operation = queue->head;
        queue_pop(queue);
        if (!operation->error) {
            operation->error = error;
            operation->provider_error = provider_error;
        }
        if (operation->completed == operation->posted)
            finish(operation);
    }
}

/* The peer can't be reached any more, or what it did is unknown. Said once. What is queued ends now, what is in
 * flight when its completions come or the port closes. The port goes on being pumped for those. */
void pd_port_lose(pd_port *port, int error, int provider_error) {
    if (port->state != PD_PORT_OPEN)
        return;
    port->state = PD_PORT_IS_LOST;
    port->lost_error = error;
    port->lost_provider_error = provider_error;
    port->blocked = false;
    drop_queue(&port->sends, error, provider_error);
    drop_queue(&port->writes, error, provider_error);
    atomic_store_explicit(&port->queued_batches, 0, memory_order_relaxed);
    atomic_store_explicit(&port->queued_sends, 0, memory_order_relaxed);
    pd_record record = {.kind = PD_LOST,
                        .port = port->id,
                        .error = error,
                        .provider_error = provider_error,
                        .ended_ns = pd_now_ns()};
    pd_push(port->fabric, &record);
}

/* At the close, when no object is left that could use them: every operation ends. */
void pd_port_end_operations(pd_port *port, int error) {
    while (port->live) {
        struct pd_operation *operation = port->live;
        if (!operation->error)
            operation->error = error;
        finish(operation);
    }
    port->sends.head = port->writes.head = NULL;
}

/* ---- posting ---- */

static size_t inflight(pd_port *port) {
    return PEEK(port->inflight_sends) + PEEK(port->inflight_writes);
}

/* EAGAIN is all a post towards a dead peer ever says. With nothing in flight, no completion can tell either: then
 * time does. Counting tries too keeps a process that was stopped itself from blaming its peer. */
static void refused(pd_port *port) {
    BUMP(port->eagain, 1);
    if (inflight(port)) {
        port->refused_tries = 0;
        return;
    }
    uint64_t now = pd_now_ns();
    if (!port->refused_tries++)
        port->refused_since_ns = now;
    else if (port->refused_tries >= PD_DEAD_TRIES && now - port->refused_since_ns >= port->fabric->config.dead_after_ns)
        pd_port_lose(port, FI_ETIMEDOUT, 0);
}

/* Common end of a post. Returns true when it went out. */
static bool posted(pd_port *port, struct pd_context *context, struct pd_context **free_list, ssize_t rc) {
    if (rc == 0) {
        port->refused_tries = 0;
        struct pd_operation *operation = context->operation;
        if (!operation->posted++)
            operation->started_ns = pd_now_ns();
        return true;
    }
    context->operation = NULL;
    context->next_free = *free_list;
    *free_list = context;
    if (rc == -FI_EAGAIN)
        refused(port);
    else
        pd_port_lose(port, (int)-rc, 0);
    return false;
}

static bool post_send(pd_port *port, struct pd_operation *operation) {
    const pd_config *config = &port->fabric->config;
    struct pd_context *context = port->free_sends;
    port->free_sends = context->next_free;
    context->operation = operation;
    unsigned char *buffer = port->slab + (size_t)context->index * config->recv_size;
    memcpy(buffer, operation->data, operation->length);
    void *desc = port->slab_mr ? fi_mr_desc(port->slab_mr) : NULL;
    ssize_t rc = fi_send(port->ep, buffer, operation->length, desc, port->peer, context);
    if (!posted(port, context, &port->free_sends, rc))
        return false;
    BUMP(port->sends_posted, 1);
    BUMP(port->inflight_sends, 1);
    BUMP(port->queued_sends, -1);
    queue_pop(&port->sends);
    return true;
}

static bool post_write(pd_port *port, struct pd_operation *operation) {
    struct pd_context *context = port->free_writes;
    port->free_writes = context->next_free;
    context->operation = operation;
    const pd_row *row = &operation->rows[operation->posted];
    const char *src = operation->src + row->src;
    uint64_t dst = operation->dst + row->dst;
    ssize_t rc = row->imm == PD_NO_IMM
                     ? fi_write(port->ep, src, row->length, operation->desc, port->peer, dst, operation->key, context)
                     : fi_writedata(port->ep, src, row->length, operation->desc, row->imm, port->peer, dst,
                                    operation->key, context);
    if (!posted(port, context, &port->free_writes, rc))
        return false;
    BUMP(port->writes_posted, 1);
    BUMP(port->bytes_posted, row->length);
    BUMP(port->inflight_writes, 1);
    if (operation->posted == operation->count) {
        BUMP(port->queued_batches, -1);
        queue_pop(&port->writes);
    }
    return true;
}

/* Post up to the quantum. Returns PD_MORE when the quantum was all that stopped it. */
static int post(pd_port *port) {
    uint32_t left = port->fabric->config.post_quantum;
    while (port->sends.head && port->free_sends && left)
        if (!post_send(port, port->sends.head))
            goto stopped;
        else
            left--;
    while (port->writes.head && port->free_writes && left)
        if (!post_write(port, port->writes.head))
            goto stopped;
        else
            left--;
    if (!left && ((port->sends.head && port->free_sends) || (port->writes.head && port->free_writes)))
        return PD_MORE;
stopped:
    /* Whatever is still queued is retried on a timer as well: neither EAGAIN nor a full cap is certain to end in
     * an event when the peer has died. */
    port->blocked = port->sends.head || port->writes.head;
    return 0;
}

int pd_port_post_receive(pd_port *port, uint32_t index) {
    const pd_config *config = &port->fabric->config;
    struct pd_context *context = &port->contexts[index];
    void *desc = port->slab_mr ? fi_mr_desc(port->slab_mr) : NULL;
    return (int)fi_recv(port->ep, port->slab + (size_t)index * config->recv_size, config->recv_size, desc,
                        FI_ADDR_UNSPEC, context);
}

/* ---- draining ---- */

static void completed(pd_port *port, struct pd_context *context, int error, int provider_error) {
    struct pd_operation *operation = context->operation;
    bool write = context->kind == PD_CONTEXT_WRITE;
    struct pd_context **free_list = write ? &port->free_writes : &port->free_sends;
    context->operation = NULL;
    context->next_free = *free_list;
    *free_list = context;
    if (write) {
        BUMP(port->writes_completed, 1);
        BUMP(port->inflight_writes, -1);
    } else {
        BUMP(port->sends_completed, 1);
        BUMP(port->inflight_sends, -1);
    }
    operation->completed++;
    if (error && !operation->error) {
        operation->error = error;
        operation->provider_error = provider_error;
    }
    /* A batch that was dropped from the queue has an error, and posts no more. */
    if (operation->completed == operation->posted &&
        (operation->posted == operation->count || (operation->error && port->state != PD_PORT_OPEN)))
        finish(operation);
}

static void received(pd_port *port, struct pd_context *context, size_t length) {
    BUMP(port->received, 1);
    BUMP(port->received_bytes, length);
    pd_record record = {
        .kind = PD_RECEIVED, .port = port->id, .token = context->index, .value = length, .ended_ns = pd_now_ns()};
    pd_push(port->fabric, &record);
}

static void drain_entry(pd_port *port, const struct fi_cq_data_entry *entry, uint64_t now) {
    if (entry->flags & FI_REMOTE_WRITE) {
        BUMP(port->imms, 1);
        if (pd_counters_add(port->counters, (uint32_t)entry->data, now))
            port->fabric->dirty = true;
        return;
    }
    struct pd_context *context = entry->op_context;
    if (!context)
        return;
    if (context->kind == PD_CONTEXT_RECV)
        received(port, context, entry->len);
    else
        completed(port, context, 0, 0);
}

/* One error entry. After any, what the peer has is unknown (on tcp the connection is gone, and with it whatever
 * was under way): the port is lost. */
static void drain_error(pd_port *port) {
    /* Newer libraries may write a longer struct. */
    union {
        struct fi_cq_err_entry entry;
        char room[sizeof(struct fi_cq_err_entry) + 64];
    } error;
    memset(&error, 0, sizeof error);
    ssize_t rc = fi_cq_readerr(port->cq, &error.entry, 0);
    if (rc == -FI_EAGAIN)
        return;
    if (rc < 0) {
        pd_port_lose(port, (int)-rc, 0);
        return;
    }
    BUMP(port->cq_errors, 1);
    int code = error.entry.err ? error.entry.err : FI_EOTHER;
    struct pd_context *context = error.entry.op_context;
    /* Mark the port first: a batch half posted may only end once nothing more of it will be. */
    pd_port_lose(port, code, error.entry.prov_errno);
    if (context && context->kind != PD_CONTEXT_RECV && context->operation)
        completed(port, context, code, error.entry.prov_errno);
}

/* Read up to the drain quantum. Returns PD_MORE when the cap was all that stopped it. */
static int drain(pd_port *port) {
    struct fi_cq_data_entry entries[16];
    uint32_t left = port->fabric->config.drain_quantum;
    while (left) {
        size_t want = left < 16 ? left : 16;
        ssize_t n = fi_cq_read(port->cq, entries, want);
        if (n == -FI_EAGAIN || n == 0)
            return 0;
        if (n == -FI_EAVAIL) {
            drain_error(port);
            left--;
            continue;
        }
        if (n < 0) {
            pd_port_lose(port, (int)-n, 0);
            return 0;
        }
        uint64_t now = pd_now_ns();
        for (ssize_t i = 0; i < n; i++)
            drain_entry(port, &entries[i], now);
        left -= (uint32_t)n;
        /* One read may have copied megabytes. A close or a message should not wait for four of them. */
        if (PEEK(port->fabric->waiting))
            break;
    }
    return PD_MORE;
}

int pd_port_progress(pd_port *port) {
    int bits = drain(port);
    return bits | post(port);
}

/* ---- the owner's side ---- */

static void run_post(struct pd_command *command) {
    struct pd_operation *operation = (struct pd_operation *)command;
    pd_port *port = operation->port;
    if ((operation->live_next = port->live))
        port->live->live_link = &operation->live_next;
    operation->live_link = &port->live;
    port->live = operation;
    if (port->state != PD_PORT_OPEN) {
        operation->error = port->state == PD_PORT_IS_LOST ? port->lost_error : FI_ECANCELED;
        operation->provider_error = port->lost_provider_error;
        finish(operation);
        return;
    }
    if (operation->kind == PD_SENT) {
        pd_queue_push(&port->sends, operation);
        BUMP(port->queued_sends, 1);
    } else {
        pd_queue_push(&port->writes, operation);
        BUMP(port->queued_batches, 1);
    }
    pd_pump_activate(port);
}

static struct pd_operation *new_operation(pd_port *port, uint32_t kind, size_t extra, uint64_t token, int *code) {
    if ((*code = pd_ring_reserve(&port->fabric->ring, 1)))
        return NULL;
    struct pd_operation *operation = calloc(1, sizeof *operation + extra);
    if (!operation) {
        pd_ring_unreserve(&port->fabric->ring, 1);
        *code = -FI_ENOMEM;
        return NULL;
    }
    atomic_fetch_add(&pd_live.operations, 1);
    operation->command.run = run_post;
    operation->port = port;
    operation->kind = kind;
    operation->token = token;
    return operation;
}

/* Queue a message; its bytes are copied. Ends in one PD_SENT record with `token`. */
int pd_port_send(pd_port *port, const void *data, size_t length, uint64_t token) {
    int code;
    struct pd_operation *operation = new_operation(port, PD_SENT, length, token, &code);
    if (!operation)
        return code;
    memcpy(operation->data, data, length);
    operation->length = length;
    operation->count = 1;
    pd_submit(port->fabric, &operation->command);
    return 0;
}

/* Queue a batch of writes; `rows` stay the caller's and must live until its one PD_WRITTEN record. Bounds were
 * checked by the caller. */
int pd_port_write(pd_port *port, pd_region *region, const pd_row *rows, size_t count, uint64_t src_shift,
                  uint64_t remote_base, uint64_t remote_key, uint64_t dst_shift, uint64_t token) {
    int code;
    struct pd_operation *operation = new_operation(port, PD_WRITTEN, 0, token, &code);
    if (!operation)
        return code;
    operation->rows = rows;
    operation->count = count;
    operation->src = (const char *)region->address + src_shift;
    operation->desc = region->fid ? fi_mr_desc(region->fid) : NULL;
    operation->dst = remote_base + dst_shift;
    operation->key = remote_key;
    pd_submit(port->fabric, &operation->command);
    return 0;
}

/* ---- receive buffers ---- */

const void *pd_port_received(pd_port *port, uint32_t index) {
    return port->slab + (size_t)index * port->fabric->config.recv_size;
}

static void run_repost(struct pd_command *command) {
    struct pd_context *context = (struct pd_context *)((char *)command - offsetof(struct pd_context, command));
    pd_port *port = context->port;
    if (port->state == PD_PORT_IS_CLOSED)
        return;
    int rc = pd_port_post_receive(port, context->index);
    if (rc)
        pd_port_lose(port, -rc, 0);
    pd_pump_activate(port);
}

/* Give a received message's buffer back. */
void pd_port_repost(pd_port *port, uint32_t index) {
    struct pd_context *context = &port->contexts[index];
    context->command.run = run_repost;
    pd_submit(port->fabric, &context->command);
}
