#define _GNU_SOURCE
#include "core.h"

#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* The pump: one pass over the ports that have something to do, then arm and sleep.
 *
 * A port is *active* from anything that touches it (its wait fd fired, a command, its own last pass) until
 * fi_trywait has said that its wait fd may be slept on. Nothing touches a port between that and the sleep, so
 * no completion can slip past; and a thousand idle ports cost nothing. fi_trywait comes after the last drain and
 * after the last post: a post may progress the CQ itself, and the event it consumed would not fire again. */

void pd_pump_activate(pd_port *port) {
    if (port->is_active)
        return;
    port->is_active = true;
    port->next_active = port->fabric->active;
    port->fabric->active = port;
}

static void deactivate(pd_port *port) {
    for (pd_port **link = &port->fabric->active; *link; link = &(*link)->next_active)
        if (*link == port) {
            *link = port->next_active;
            break;
        }
    port->is_active = false;
}

void pd_pump_attach(pd_port *port) {
    pd_fabric *fabric = port->fabric;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = port};
    if (epoll_ctl(fabric->epoll_fd, EPOLL_CTL_ADD, port->wait_fd, &event) < 0)
        port->close_code = errno; /* read by pd_port_open */
    if ((port->next = fabric->ports))
        port->next->link = &port->next;
    port->link = &fabric->ports;
    fabric->ports = port;
    BUMP(fabric->attached, 1);
    pd_pump_activate(port);
}

void pd_pump_detach(pd_port *port) {
    pd_fabric *fabric = port->fabric;
    epoll_ctl(fabric->epoll_fd, EPOLL_CTL_DEL, port->wait_fd, NULL);
    if ((*port->link = port->next))
        port->next->link = port->link;
    deactivate(port);
    BUMP(fabric->attached, -1);
}

void pd_push(pd_fabric *fabric, const pd_record *record) {
    pd_ring_push(&fabric->ring, record);
    BUMP(fabric->pushed, 1);
    fabric->dirty = true;
}

static void poke(pd_fabric *fabric) {
    if (!fabric->dirty)
        return;
    fabric->dirty = false;
    if (!fabric->config.threaded || atomic_exchange(&fabric->poked, 1))
        return; /* inline: the owner takes records after each pass anyway */
    uint64_t one = 1;
    (void)!write(fabric->poke_fd, &one, sizeof one);
    BUMP(fabric->pokes, 1);
}

/* Mark the ports whose wait fd fired. Returns what epoll_wait did. */
static int gather(pd_fabric *fabric, int timeout_ms) {
    struct epoll_event events[PD_EPOLL_BATCH];
    int n = epoll_wait(fabric->epoll_fd, events, PD_EPOLL_BATCH, timeout_ms);
    for (int i = 0; i < n; i++) {
        uint64_t ignored;
        if (events[i].data.ptr)
            pd_pump_activate(events[i].data.ptr);
        else
            (void)!read(fabric->command_fd, &ignored, sizeof ignored);
    }
    return n;
}

/* Give each active port one bounded turn. PD_MORE: some port hit its cap and wants another at once. */
static int pass_over(pd_fabric *fabric) {
    int bits = 0;
    BUMP(fabric->passes, 1);
    for (pd_port *port = fabric->active, *next; port; port = next) {
        next = port->next_active;
        bits |= pd_port_progress(port);
    }
    return bits;
}

/* Ask every active port whether its wait fd may be slept on. Returns PD_MORE when one may not; PD_PENDING when
 * all may but some posts wait for a retry that no event announces (EAGAIN towards a dead peer). */
static int arm(pd_fabric *fabric) {
    int bits = 0;
    for (pd_port **link = &fabric->active; *link;) {
        pd_port *port = *link;
        struct fid *fid = &port->cq->fid;
        int rc = fi_trywait(fabric->fid, &fid, 1);
        if (rc == -FI_EAGAIN) {
            bits |= PD_MORE;
            link = &port->next_active;
            continue;
        }
        if (rc < 0)
            pd_port_lose(port, -rc, 0);
        *link = port->next_active;
        port->is_active = false;
    }
    if (bits)
        return bits;
    for (pd_port *port = fabric->ports; port; port = port->next)
        if (port->blocked)
            return PD_PENDING;
    return 0;
}

static void retry(pd_fabric *fabric) {
    BUMP(fabric->timeouts, 1);
    for (pd_port *port = fabric->ports; port; port = port->next)
        if (port->blocked)
            pd_pump_activate(port);
}

/* ---- inline mode: the owner's loop drives ---- */

int pd_fabric_pass(pd_fabric *fabric) {
    gather(fabric, 0);
    int bits = pass_over(fabric);
    poke(fabric);
    return bits;
}

int pd_fabric_arm(pd_fabric *fabric) {
    int bits = arm(fabric);
    if (!(bits & PD_MORE))
        BUMP(fabric->sleeps, 1);
    return bits;
}

void pd_fabric_retry(pd_fabric *fabric) {
    retry(fabric);
}

/* ---- thread mode ---- */

static void run_commands(pd_fabric *fabric) {
    if (!PEEK(fabric->waiting)) /* have_commands() looks under the lock before any sleep */
        return;
    pthread_mutex_lock(&fabric->lock);
    struct pd_command *command = fabric->commands;
    fabric->commands = NULL;
    atomic_store_explicit(&fabric->waiting, 0, memory_order_relaxed);
    fabric->commands_tail = &fabric->commands;
    pthread_mutex_unlock(&fabric->lock);
    while (command) {
        struct pd_command *next = command->next; /* running it may free it */
        command->run(command);
        BUMP(fabric->ran, 1);
        command = next;
    }
}

static bool have_commands(pd_fabric *fabric) {
    pthread_mutex_lock(&fabric->lock);
    bool any = fabric->commands != NULL;
    pthread_mutex_unlock(&fabric->lock);
    return any;
}

static void *thread_main(void *argument) {
    pd_fabric *fabric = argument;
    while (!atomic_load(&fabric->stop)) {
        run_commands(fabric);
        int bits = pass_over(fabric);
        poke(fabric);
        if (bits & PD_MORE) {
            gather(fabric, 0); /* a busy port must not hide the others */
            continue;
        }
        bits = arm(fabric);
        poke(fabric);
        if (bits & PD_MORE)
            continue;
        /* The submitter appends, then reads `sleeping`; we set it, then look at the list. One of us sees. */
        atomic_store(&fabric->sleeping, 1);
        if (have_commands(fabric) || atomic_load(&fabric->stop)) {
            atomic_store(&fabric->sleeping, 0);
            continue;
        }
        BUMP(fabric->sleeps, 1);
        int n = gather(fabric, bits & PD_PENDING ? PD_RETRY_MS : -1);
        atomic_store(&fabric->sleeping, 0);
        if (n == 0)
            retry(fabric);
    }
    return NULL;
}

static void wake_thread(pd_fabric *fabric) {
    uint64_t one = 1;
    if (atomic_load(&fabric->sleeping))
        (void)!write(fabric->command_fd, &one, sizeof one);
}

int pd_pump_start(pd_fabric *fabric) {
    sigset_t all, before;
    sigfillset(&all);
    /* The thread inherits a full mask: signals stay with Python's main thread. */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&fabric->thread, NULL, thread_main, fabric);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc)
        return -rc;
    pthread_setname_np(fabric->thread, "pdserve-fabric");
    if (fabric->config.cpu >= 0) {
        cpu_set_t cpus;
        CPU_ZERO(&cpus);
        CPU_SET(fabric->config.cpu, &cpus);
        if ((rc = pthread_setaffinity_np(fabric->thread, sizeof cpus, &cpus))) {
            fabric->running = true;
            pd_pump_stop(fabric);
            return -rc;
        }
    }
    fabric->running = true;
    return 0;
}

void pd_pump_stop(pd_fabric *fabric) {
    if (!fabric->running)
        return;
    atomic_store(&fabric->stop, 1);
    wake_thread(fabric);
    pthread_join(fabric->thread, NULL);
    fabric->running = false;
}

/* Hand a command to the pumping thread; inline, run it here. */
void pd_submit(pd_fabric *fabric, struct pd_command *command) {
    if (!fabric->running) {
        command->run(command);
        return;
    }
    command->next = NULL;
    pthread_mutex_lock(&fabric->lock);
    *fabric->commands_tail = command;
    fabric->commands_tail = &command->next;
    atomic_store_explicit(&fabric->waiting, 1, memory_order_relaxed);
    pthread_mutex_unlock(&fabric->lock);
    wake_thread(fabric);
}

struct call {
    struct pd_command command;
    void (*function)(void *);
    void *argument;
    sem_t done;
};

static void run_call(struct pd_command *command) {
    struct call *call = (struct call *)command;
    call->function(call->argument);
    sem_post(&call->done);
}

/* Run a function on the pumping thread and wait for it: rare things only (register, connect, close). */
void pd_call(pd_fabric *fabric, void (*function)(void *), void *argument) {
    struct call call = {.command.run = run_call, .function = function, .argument = argument};
    sem_init(&call.done, 0, 0);
    pd_submit(fabric, &call.command);
    while (sem_wait(&call.done) < 0 && errno == EINTR)
        ;
    sem_destroy(&call.done);
}

static void call_nothing(void *argument) {
    (void)argument;
}

/* Wait until every command submitted so far has run. */
void pd_fabric_barrier(pd_fabric *fabric) {
    pd_call(fabric, call_nothing, NULL);
}
