#include "core.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

struct pd_library pd_lib;

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
