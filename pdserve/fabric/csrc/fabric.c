#include "core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

static struct fi_info *make_hints(const pd_config *config) {
    /* fi_dupinfo(NULL) is fi_allocinfo: the attribute structs come from the library that frees them. */
    struct fi_info *hints = pd_lib.dupinfo(NULL);
    if (!hints)
        return NULL;
    hints->caps = FI_MSG | FI_RMA | FI_SEND | FI_RECV | FI_WRITE | FI_REMOTE_WRITE;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT;
    hints->domain_attr->cq_data_size = 4;
    hints->fabric_attr->prov_name = strdup(config->provider);
    return hints;
}

/* The provider's own offer, not one layered over its message endpoints: on libfabric 2 a sender killed under
 * "tcp;ofi_rxm" crashes the receiver. */
static struct fi_info *choose(struct fi_info *offers, const pd_config *config) {
    for (struct fi_info *offer = offers; offer; offer = offer->next) {
        const char *name = offer->fabric_attr->prov_name;
        if (!strncmp(name, "tcp;", 4) && strstr(name, "ofi_rxm"))
            continue;
        if (!strcmp(name, config->provider) && offer->domain_attr->cq_data_size >= 4)
            return pd_lib.dupinfo(offer);
    }
    return NULL;
}

static int query(pd_fabric *fabric, pd_failure *failure) {
    uint32_t ours = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION), theirs = pd_lib.version();
    struct fi_info *hints = make_hints(&fabric->config), *offers = NULL;
    if (!hints)
        return -FI_ENOMEM;
    snprintf(failure->action, sizeof failure->action, "fi_getinfo");
    int rc = pd_lib.getinfo(FI_VERSION_LT(ours, theirs) ? ours : theirs, fabric->config.host, NULL, FI_SOURCE, hints,
                            &offers);
    if (rc == 0) {
        fabric->info = choose(offers, &fabric->config);
        pd_lib.freeinfo(offers);
        if (!fabric->info)
            rc = -FI_ENODATA;
    }
    pd_lib.freeinfo(hints);
    return rc;
}

static void copy_text(char *out, size_t size, const char *text) {
    snprintf(out, size, "%s", text ? text : "");
}

static void describe(const struct fi_info *found, pd_info *out) {
    memset(out, 0, sizeof *out);
    copy_text(out->provider, sizeof out->provider, found->fabric_attr->prov_name);
    copy_text(out->fabric, sizeof out->fabric, found->fabric_attr->name);
    copy_text(out->domain, sizeof out->domain, found->domain_attr->name);
    out->mr_mode = (uint64_t)found->domain_attr->mr_mode;
    out->max_message = found->ep_attr->max_msg_size;
    out->cq_data_size = found->domain_attr->cq_data_size;
    out->max_key_size = found->domain_attr->mr_key_size;
    out->api_version = found->fabric_attr->api_version;
    out->address_format = found->addr_format;
}

static int open_descriptors(pd_fabric *fabric) {
    if ((fabric->epoll_fd = epoll_create1(EPOLL_CLOEXEC)) < 0)
        return -errno;
    if (!fabric->config.threaded)
        return 0;
    if ((fabric->command_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) < 0 ||
        (fabric->poke_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) < 0)
        return -errno;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    return epoll_ctl(fabric->epoll_fd, EPOLL_CTL_ADD, fabric->command_fd, &event) < 0 ? -errno : 0;
}

static void release(pd_fabric *fabric) {
    if (fabric->info)
        pd_lib.freeinfo(fabric->info);
    if (fabric->epoll_fd >= 0)
        close(fabric->epoll_fd);
    if (fabric->command_fd >= 0)
        close(fabric->command_fd);
    if (fabric->poke_fd >= 0)
        close(fabric->poke_fd);
    pthread_mutex_destroy(&fabric->lock);
    free(fabric->ring.records);
    free((char *)fabric->config.provider);
    free((char *)fabric->config.host);
    free(fabric);
}

pd_fabric *pd_fabric_open(const pd_config *config, pd_info *info, pd_failure *failure) {
    memset(failure, 0, sizeof *failure);
    pd_fabric *fabric = calloc(1, sizeof *fabric);
    if (!fabric) {
        failure->code = FI_ENOMEM;
        return NULL;
    }
    fabric->config = *config;
    fabric->config.provider = strdup(config->provider);
    fabric->config.host = strdup(config->host);
    fabric->epoll_fd = fabric->command_fd = fabric->poke_fd = -1;
    fabric->commands_tail = &fabric->commands;
    pthread_mutex_init(&fabric->lock, NULL);
    int rc = pd_ring_init(&fabric->ring, config->ring_size);
    if (!rc)
        rc = query(fabric, failure);
    if (!rc) {
        describe(fabric->info, info);
        snprintf(failure->action, sizeof failure->action, "fi_fabric");
        rc = pd_lib.fabric(fabric->info->fabric_attr, &fabric->fid, NULL);
    }
    if (!rc) {
        snprintf(failure->action, sizeof failure->action, "opening event descriptors");
        rc = open_descriptors(fabric);
    }
    if (!rc && config->threaded) {
        snprintf(failure->action, sizeof failure->action, "starting the fabric thread");
        rc = pd_pump_start(fabric);
    }
    if (rc) {
        failure->code = -rc;
        if (fabric->fid)
            fi_close(&fabric->fid->fid);
        release(fabric);
        return NULL;
    }
    atomic_fetch_add(&pd_live.fabrics, 1);
    return fabric;
}

/* All ports are closed and freed. Stops the thread, then gives everything back. -FI_EBUSY leaves it open. */
int pd_fabric_close(pd_fabric *fabric) {
    if (PEEK(fabric->attached))
        return -FI_EBUSY;
    pd_pump_stop(fabric);
    int rc = fi_close(&fabric->fid->fid);
    if (rc)
        return rc;
    atomic_fetch_sub(&pd_live.fabrics, 1);
    release(fabric);
    return 0;
}

/* What the owner sleeps on: readable when records or counts wait (thread mode) or a pass is due (inline). */
int pd_fabric_fd(pd_fabric *fabric) {
    return fabric->config.threaded ? fabric->poke_fd : fabric->epoll_fd;
}

/* Thread mode, when pd_fabric_fd was readable and before taking: reset the eventfd, then allow the next poke. The
 * order makes `poked` imply a readable eventfd, so what is pushed while the owner takes wakes it again. */
void pd_fabric_reset(pd_fabric *fabric) {
    uint64_t ignored;
    (void)!read(fabric->poke_fd, &ignored, sizeof ignored);
    atomic_store(&fabric->poked, 0);
}

int pd_fabric_take(pd_fabric *fabric, pd_record *out, int max) {
    int n = pd_ring_take(&fabric->ring, out, max);
    for (int i = 0; i < n; i++)
        if (out[i].kind == PD_SENT || out[i].kind == PD_WRITTEN)
            pd_ring_unreserve(&fabric->ring, 1);
    return n;
}

void pd_fabric_statistics(pd_fabric *fabric, pd_pump_statistics *out) {
    out->passes = PEEK(fabric->passes);
    out->sleeps = PEEK(fabric->sleeps);
    out->timeouts = PEEK(fabric->timeouts);
    out->pokes = PEEK(fabric->pokes);
    out->records = PEEK(fabric->pushed);
    out->commands = PEEK(fabric->ran);
    out->ports = PEEK(fabric->attached);
    out->outstanding = fabric->ring.reserved;
    out->ring_size = fabric->ring.size;
}
