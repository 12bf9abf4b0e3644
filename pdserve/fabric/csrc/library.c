#include "core.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct pd_library pd_lib;

static void copy_text(char *out, size_t size, const char *text) {
    snprintf(out, size, "%s", text ? text : "");
}

static void *resolve(void *handle, const char *symbol, char *message, size_t size) {
    void *address = dlsym(handle, symbol);
    if (!address)
        snprintf(message, size, "it has no symbol %s", symbol);
    return address;
}

/* Load libfabric from `path`, once a process: its providers start state and threads that can't be unloaded. The
 * caller makes sure that a second call names the same file. */
int pd_library_load(const char *path, char *message, size_t size) {
    if (pd_lib.getinfo)
        return 0;
    /* Old builds carry psm providers whose constructors replace SIGINT, SIGTERM and SIGSEGV handlers. */
    setenv("IPATH_NO_BACKTRACE", "1", 0);
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        snprintf(message, size, "%s", dlerror());
        return -FI_ENOENT;
    }
    struct pd_library found;
    if (!(found.getinfo = resolve(handle, "fi_getinfo", message, size)) ||
        !(found.freeinfo = resolve(handle, "fi_freeinfo", message, size)) ||
        !(found.dupinfo = resolve(handle, "fi_dupinfo", message, size)) ||
        !(found.fabric = resolve(handle, "fi_fabric", message, size)) ||
        !(found.strerror = resolve(handle, "fi_strerror", message, size)) ||
        !(found.version = resolve(handle, "fi_version", message, size))) {
        dlclose(handle);
        return -FI_ENOSYS;
    }
    pd_lib = found;
    return 0;
}

uint32_t pd_library_version(void) {
    return pd_lib.version ? pd_lib.version() : 0;
}

const char *pd_strerror(int code) {
    return pd_lib.strerror ? pd_lib.strerror(code) : "";
}

/* What every provider offers, before any wish. Returns how many there are, of which the first `max` are in `out`. */
int pd_library_offers(pd_offer *out, int max) {
    struct fi_info *offers = NULL;
    uint32_t ours = FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION), theirs;
    if (!pd_lib.getinfo)
        return -FI_ENOSYS;
    theirs = pd_lib.version();
    int count = 0, rc = pd_lib.getinfo(FI_VERSION_LT(ours, theirs) ? ours : theirs, NULL, NULL, 0, NULL, &offers);
    if (rc)
        return rc;
    for (const struct fi_info *offer = offers; offer; offer = offer->next, count++) {
        if (count >= max)
            continue;
        pd_offer *entry = &out[count];
        memset(entry, 0, sizeof *entry);
        copy_text(entry->provider, sizeof entry->provider, offer->fabric_attr->prov_name);
        copy_text(entry->fabric, sizeof entry->fabric, offer->fabric_attr->name);
        copy_text(entry->domain, sizeof entry->domain, offer->domain_attr->name);
        entry->endpoint = offer->ep_attr->type;
        entry->version = offer->fabric_attr->prov_version;
        entry->capabilities = offer->caps;
        entry->cq_data_size = offer->domain_attr->cq_data_size;
    }
    pd_lib.freeinfo(offers);
    return count;
}
