#include "core.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int step(pd_failure *failure, const char *action, int rc) {
    if (rc < 0) {
        failure->code = -rc;
        snprintf(failure->action, sizeof failure->action, "%s", action);
    }
    return rc;
}

/* Contexts: [recv_buffers | max_inflight_sends | max_inflight_writes]; the slab holds the buffers of the first two. */
static int make_contexts(pd_port *port) {
    const pd_config *config = &port->fabric->config;
    uint32_t buffers = config->recv_buffers + config->max_inflight_sends;
    uint32_t total = buffers + config->max_inflight_writes;
    port->slab = calloc(buffers, config->recv_size);
    port->contexts = calloc(total, sizeof *port->contexts);
    if (!port->slab || !port->contexts)
        return -FI_ENOMEM;
    for (uint32_t i = total; i-- > 0;) {
        struct pd_context *context = &port->contexts[i];
        context->index = i;
        context->port = port;
        if (i < config->recv_buffers) {
            context->kind = PD_CONTEXT_RECV;
        } else if (i < buffers) {
            context->kind = PD_CONTEXT_SEND;
            context->next_free = port->free_sends;
            port->free_sends = context;
        } else {
            context->kind = PD_CONTEXT_WRITE;
            context->next_free = port->free_writes;
            port->free_writes = context;
        }
    }
    return 0;
}

static int open_endpoint(pd_port *port, pd_failure *failure) {
    pd_fabric *fabric = port->fabric;
    struct fi_cq_attr cq_attr = {
        .size = fabric->config.cq_size, .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_FD};
    struct fi_av_attr av_attr = {.type = FI_AV_TABLE, .count = 1};
    if (step(failure, "fi_domain", fi_domain(fabric->fid, port->info, &port->domain, NULL)))
        return -1;
    atomic_fetch_add(&pd_live.domains, 1);
    if (step(failure, "fi_av_open", fi_av_open(port->domain, &av_attr, &port->av, NULL)))
        return -1;
    atomic_fetch_add(&pd_live.address_vectors, 1);
    if (step(failure, "fi_cq_open", fi_cq_open(port->domain, &cq_attr, &port->cq, NULL)))
        return -1;
    atomic_fetch_add(&pd_live.completion_queues, 1);
    if (step(failure, "fi_control(FI_GETWAIT)", fi_control(&port->cq->fid, FI_GETWAIT, &port->wait_fd)))
        return -1;
    fcntl(port->wait_fd, F_SETFD, FD_CLOEXEC);
    if (step(failure, "fi_endpoint", fi_endpoint(port->domain, port->info, &port->ep, NULL)))
        return -1;
    atomic_fetch_add(&pd_live.endpoints, 1);
    if (step(failure, "fi_ep_bind(av)", fi_ep_bind(port->ep, &port->av->fid, 0)) ||
        step(failure, "fi_ep_bind(cq)", fi_ep_bind(port->ep, &port->cq->fid, FI_TRANSMIT | FI_RECV)) ||
        step(failure, "fi_enable", fi_enable(port->ep)))
        return -1;
    return 0;
}

static int open_slab(pd_port *port, pd_failure *failure) {
    const pd_config *config = &port->fabric->config;
    size_t length = (size_t)(config->recv_buffers + config->max_inflight_sends) * config->recv_size;
    if (port->info->domain_attr->mr_mode & FI_MR_LOCAL) {
        if (step(failure, "fi_mr_reg(message buffers)",
                 fi_mr_reg(port->domain, port->slab, length, FI_SEND | FI_RECV, 0, 0, 0, &port->slab_mr, NULL)))
            return -1;
        atomic_fetch_add(&pd_live.regions, 1);
    }
    for (uint32_t i = 0; i < config->recv_buffers; i++)
        if (step(failure, "fi_recv", pd_port_post_receive(port, i)))
            return -1;
    return 0;
}

static int close_fid(struct fid *fid, _Atomic int64_t *live) {
    int rc = fi_close(fid);
    if (rc == 0)
        atomic_fetch_sub(live, 1);
    return rc;
}

static int close_regions(pd_port *port) {
    int first = 0, rc;
    for (pd_region *region = port->regions; region; region = region->next)
        if (region->fid) {
            if ((rc = close_fid(&region->fid->fid, &pd_live.regions)) && !first)
                first = rc;
            region->fid = NULL;
        }
    return first;
}

/* The fence. Runs on the thread that pumps the port; between the endpoint's close and the end no CQ is read.
 *
 * Order: endpoint, registrations, AV, CQ, domain. The endpoint goes first because it alone stops what is
 * landing: a closed registration refuses the next write, but the message under way goes on. On tcp (2.5.1)
 * endpoint and registrations close in either order, before or after AV and CQ; an AV, CQ or domain closed before
 * its endpoint answers FI_EBUSY and leaks. Where a registration is bound to its endpoint (FI_MR_ENDPOINT), the
 * endpoint is the one that answers FI_EBUSY until the registrations have gone. */
static int close_objects(pd_port *port) {
    int first = 0, rc;
    if (port->info->domain_attr->mr_mode & FI_MR_ENDPOINT)
        first = close_regions(port);
    if (port->ep && (rc = close_fid(&port->ep->fid, &pd_live.endpoints)) && !first)
        first = rc;
    if ((rc = close_regions(port)) && !first)
        first = rc;
    if (port->slab_mr && (rc = close_fid(&port->slab_mr->fid, &pd_live.regions)) && !first)
        first = rc;
    if (port->av && (rc = close_fid(&port->av->fid, &pd_live.address_vectors)) && !first)
        first = rc;
    if (port->cq && (rc = close_fid(&port->cq->fid, &pd_live.completion_queues)) && !first)
        first = rc;
    if (port->domain && (rc = close_fid(&port->domain->fid, &pd_live.domains)) && !first)
        first = rc;
    return first;
}

static void shut_down(pd_port *port) {
    pd_pump_detach(port);
    port->close_code = close_objects(port);
    port->state = PD_PORT_IS_CLOSED;
    pd_port_end_operations(port, FI_ECANCELED);
    pd_record record = {.kind = PD_CLOSED, .port = port->id, .error = -port->close_code, .ended_ns = pd_now_ns()};
    pd_push(port->fabric, &record);
}

static void run_close(struct pd_command *command) {
    shut_down((pd_port *)((char *)command - offsetof(pd_port, close_command)));
}

static void call_close(void *port) {
    shut_down(port);
}

static void call_attach(void *port) {
    pd_pump_attach(port);
}

/* Begin to close; a PD_CLOSED record says that nothing can land any more. All its operations' records come
 * before that one. */
int pd_port_close_begin(pd_port *port) {
    port->close_command.run = run_close;
    pd_submit(port->fabric, &port->close_command);
    return 0;
}

/* The same, waiting for it. The records are in the ring when it returns. */
int pd_port_close_now(pd_port *port) {
    pd_call(port->fabric, call_close, port);
    return port->close_code;
}

/* After PD_CLOSED was taken: contexts outlive the endpoint, so they go only here. If an object refused to close,
 * the provider may still use them: they are leaked on purpose, and the handle counters show it. */
void pd_port_free(pd_port *port) {
    pd_ring_unreserve(&port->fabric->ring, port->fabric->config.recv_buffers + 2);
    if (port->info)
        pd_lib.freeinfo(port->info);
    while (port->regions) {
        pd_region *region = port->regions;
        port->regions = region->next;
        free(region);
    }
    if (port->close_code == 0) {
        free(port->slab);
        free(port->contexts);
        atomic_fetch_sub(&pd_live.ports, 1);
        free(port);
    }
}

pd_port *pd_port_open(pd_fabric *fabric, uint32_t id, pd_counters *counters, pd_failure *failure) {
    memset(failure, 0, sizeof *failure);
    uint64_t places = fabric->config.recv_buffers + 2;
    if (step(failure, "reserving completion records", pd_ring_reserve(&fabric->ring, places)))
        return NULL;
    pd_port *port = calloc(1, sizeof *port);
    if (!port) {
        pd_ring_unreserve(&fabric->ring, places);
        step(failure, "allocating a port", -FI_ENOMEM);
        return NULL;
    }
    atomic_fetch_add(&pd_live.ports, 1);
    port->fabric = fabric;
    port->id = id;
    port->counters = counters;
    port->wait_fd = -1;
    port->peer = FI_ADDR_UNSPEC;
    port->sends.tail = &port->sends.head;
    port->writes.tail = &port->writes.head;
    /* Its own copy: fi_endpoint may write to the source address. */
    port->info = pd_lib.dupinfo(fabric->info);
    if (!step(failure, "fi_dupinfo", port->info ? 0 : -FI_ENOMEM) &&
        !step(failure, "allocating message buffers", make_contexts(port)) && !open_endpoint(port, failure) &&
        !open_slab(port, failure)) {
        pd_call(fabric, call_attach, port);
        if (!port->close_code)
            return port;
        step(failure, "epoll_ctl", -port->close_code);
        pd_call(fabric, call_close, port);
    } else if (port->info) {
        port->close_code = close_objects(port);
    }
    pd_port_free(port);
    return NULL;
}

/* The endpoint's name; `*length` is the room, then the size. Valid from open to close, and constant. */
int pd_port_address(pd_port *port, void *out, size_t *length) {
    return fi_getname(&port->ep->fid, out, length);
}

struct connecting {
    pd_port *port;
    const void *address;
    int rc;
};

static void call_connect(void *argument) {
    struct connecting *c = argument;
    int rc = fi_av_insert(c->port->av, c->address, 1, &c->port->peer, 0, NULL);
    c->rc = rc == 1 ? 0 : rc < 0 ? rc : -FI_EINVAL;
    pd_pump_activate(c->port);
}

int pd_port_connect(pd_port *port, const void *address) {
    struct connecting c = {.port = port, .address = address};
    pd_call(port->fabric, call_connect, &c);
    return c.rc;
}

struct registering {
    pd_region *region;
    pd_failure *failure;
};

static void call_register(void *argument) {
    struct registering *r = argument;
    pd_region *region = r->region;
    pd_port *port = region->port;
    uint64_t mode = (uint64_t)port->info->domain_attr->mr_mode;
    if (step(r->failure, "fi_mr_reg",
             fi_mr_reg(port->domain, region->address, region->length, FI_WRITE | FI_REMOTE_WRITE, 0, region->key, 0,
                       &region->fid, NULL))) {
        region->fid = NULL;
        return;
    }
    atomic_fetch_add(&pd_live.regions, 1);
    if ((region->next = port->regions))
        region->next->link = &region->next;
    region->link = &port->regions;
    port->regions = region;
    if (mode & FI_MR_ENDPOINT &&
        (step(r->failure, "fi_mr_bind", fi_mr_bind(region->fid, &port->ep->fid, 0)) ||
         step(r->failure, "fi_mr_enable", fi_mr_enable(region->fid))))
        return;
    region->key = fi_mr_key(region->fid);
    region->base = mode & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)region->address : 0;
    pd_pump_activate(port);
}

/* Register memory that the caller keeps mapped until the port is closed. `key` is used where the application
 * picks keys. The struct belongs to the port. */
pd_region *pd_region_open(pd_port *port, void *address, size_t length, uint64_t key, pd_failure *failure) {
    memset(failure, 0, sizeof *failure);
    pd_region *region = calloc(1, sizeof *region);
    if (!region) {
        step(failure, "allocating a region", -FI_ENOMEM);
        return NULL;
    }
    region->port = port;
    region->address = address;
    region->length = length;
    region->key = key;
    struct registering r = {.region = region, .failure = failure};
    pd_call(port->fabric, call_register, &r);
    if (!failure->code)
        return region;
    if (region->fid)
        pd_region_close(region); /* stays on the port's list, freed with it */
    else
        free(region);
    return NULL;
}

uint64_t pd_region_key(pd_region *region) {
    return region->key;
}

uint64_t pd_region_base(pd_region *region) {
    return region->base;
}

struct unregistering {
    pd_region *region;
    int rc;
};

static void call_unregister(void *argument) {
    struct unregistering *u = argument;
    u->rc = u->region->fid ? close_fid(&u->region->fid->fid, &pd_live.regions) : 0;
    if (u->rc == 0)
        u->region->fid = NULL;
    pd_pump_activate(u->region->port);
}

int pd_region_close(pd_region *region) {
    struct unregistering u = {.region = region};
    pd_call(region->port->fabric, call_unregister, &u);
    return u.rc;
}

void pd_port_read_statistics(pd_port *port, pd_port_statistics *out) {
    *out = (pd_port_statistics){
        .writes_posted = PEEK(port->writes_posted),
        .writes_completed = PEEK(port->writes_completed),
        .bytes_posted = PEEK(port->bytes_posted),
        .sends_posted = PEEK(port->sends_posted),
        .sends_completed = PEEK(port->sends_completed),
        .received = PEEK(port->received),
        .received_bytes = PEEK(port->received_bytes),
        .imms = PEEK(port->imms),
        .eagain = PEEK(port->eagain),
        .cq_errors = PEEK(port->cq_errors),
        .queued_batches = PEEK(port->queued_batches),
        .queued_sends = PEEK(port->queued_sends),
        .inflight_writes = PEEK(port->inflight_writes),
        .inflight_sends = PEEK(port->inflight_sends),
    };
}
