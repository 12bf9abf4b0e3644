#include "core.h"

struct pd_live pd_live;

void pd_handles_read(pd_handles *out) {
    out->fabrics = PEEK(pd_live.fabrics);
    out->domains = PEEK(pd_live.domains);
    out->endpoints = PEEK(pd_live.endpoints);
    out->regions = PEEK(pd_live.regions);
    out->completion_queues = PEEK(pd_live.completion_queues);
    out->address_vectors = PEEK(pd_live.address_vectors);
    out->ports = PEEK(pd_live.ports);
    out->operations = PEEK(pd_live.operations);
}
