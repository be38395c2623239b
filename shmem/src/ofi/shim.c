// Wrappers of libfabric's inline functions, for Rust. They return 0 or a negative error number of fi_errno.h. `ffi.rs` declares
// the same structures. The library is loaded at run time.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#define ADDRESS_BYTES 256
#define NAME_BYTES 64
#define TEXT_BYTES 128

struct aristos_ofi {
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_cq *cq;
    struct fid_av *av;
    struct fid_ep *ep;
    struct fid_mr *mr;
};

struct aristos_ofi_facts {
    char provider[NAME_BYTES];
    uint8_t address[ADDRESS_BYTES];
    uint64_t address_bytes;
    // Address of the heap's start for peers, and its key.
    uint64_t base;
    uint64_t key;
    uint64_t max_message_bytes;
    uint32_t protocol;
    uint32_t protocol_version;
    // Descriptor to poll, or -1.
    int32_t fd;
};

enum { WRITE, READ, SET, ADD, FETCH_ADD };

struct aristos_ofi_op {
    uint32_t kind;
    // From fi_av_insert.
    uint64_t to;
    uint64_t at;
    uint64_t key;
    // Also the operand of an atomic.
    void *buffer;
    uint64_t bytes;
    // Receives FETCH_ADD's previous value.
    void *result;
    // 64 bytes for the provider; identifies the completion.
    void *context;
};

struct aristos_ofi_done {
    void *context;
    // 0 or a number of fi_errno.h.
    int32_t error;
    char text[TEXT_BYTES];
};

// Exported functions; the inline functions call through the objects that these create.
static struct {
    int (*getinfo)(uint32_t, const char *, const char *, uint64_t, const struct fi_info *, struct fi_info **);
    void (*freeinfo)(struct fi_info *);
    struct fi_info *(*dupinfo)(const struct fi_info *);
    int (*fabric)(struct fi_fabric_attr *, struct fid_fabric **, void *);
    const char *(*strerror)(int);
} fi;

static const char *load(void) {
    // Debian's libfabric links libraries of old networks, which install signal handlers (SIGTERM and others) when loaded;
    // restore the old ones.
    struct sigaction before[NSIG];
    int known[NSIG] = {0};
    for (int number = 1; number < NSIG; number++)
        known[number] = sigaction(number, NULL, &before[number]) == 0;
    void *library = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
    for (int number = 1; number < NSIG; number++)
        if (known[number] && number != SIGKILL && number != SIGSTOP)
            sigaction(number, &before[number], NULL);
    if (!library)
        return dlerror();
#define FIND(name)                                                                                                       \
    do {                                                                                                                 \
        *(void **)&fi.name = dlsym(library, "fi_" #name);                                                                \
        if (!fi.name)                                                                                                    \
            return "libfabric.so.1: no fi_" #name;                                                                       \
    } while (0)
    FIND(getinfo);
    FIND(freeinfo);
    FIND(dupinfo);
    FIND(fabric);
    FIND(strerror);
    return NULL;
}

// Must be called first, by one thread. Returns NULL, or the reason why the library cannot be loaded.
const char *aristos_ofi_load(void) { return load(); }

static int find(const char *provider, const char *node, int mr_mode, struct fi_info **found) {
    struct fi_info *hints = fi.dupinfo(NULL);
    if (!hints)
        return -FI_ENOMEM;
    hints->caps = FI_RMA | FI_ATOMIC;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    // A completion means that the bytes are in the target's memory.
    hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
    // One thread at a time calls libfabric.
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->mr_mode = mr_mode;
    // Without FI_MR_LOCAL, so that local buffers may be any memory.
    hints->fabric_attr->prov_name = strdup(provider);
    int error = hints->fabric_attr->prov_name
                    ? fi.getinfo(FI_VERSION(1, 15), node, NULL, node ? FI_SOURCE : 0, hints, found)
                    : -FI_ENOMEM;
    fi.freeinfo(hints);
    return error;
}

// Chooses the provider's network with the address `node`, or, if the provider does not use such addresses, network number
// `choice` modulo their number.
static int choose(const char *provider, const char *node, uint64_t choice, struct fi_info **chosen) {
    int mr_mode = FI_MR_ENDPOINT | FI_MR_ALLOCATED | FI_MR_VIRT_ADDR;
    struct fi_info *found = NULL;
    int error = find(provider, node, mr_mode, &found);
    if (error)
        error = find(provider, node, mr_mode | FI_MR_PROV_KEY, &found);
    int by_node = !error;
    if (error)
        error = find(provider, NULL, mr_mode, &found);
    if (error)
        error = find(provider, NULL, mr_mode | FI_MR_PROV_KEY, &found);
    if (error)
        return error;
    // The provider's networks are listed first, each possibly several times.
    struct fi_info *pick = found;
    if (!by_node) {
        uint64_t networks = 0;
        for (int round = 0; round < 2; round++) {
            const char *last = "";
            uint64_t seen = 0;
            for (struct fi_info *at = found; at; at = at->next) {
                if (strcmp(at->fabric_attr->prov_name, found->fabric_attr->prov_name) != 0)
                    continue;
                if (strcmp(at->domain_attr->name, last) == 0)
                    continue;
                last = at->domain_attr->name;
                if (round == 1 && seen == choice % networks)
                    pick = at;
                seen++;
            }
            networks = seen;
        }
    }
    *chosen = fi.dupinfo(pick);
    fi.freeinfo(found);
    return *chosen ? 0 : -FI_ENOMEM;
}

void aristos_ofi_close(struct aristos_ofi *ofi) {
    if (ofi->ep)
        fi_close(&ofi->ep->fid);
    if (ofi->mr)
        fi_close(&ofi->mr->fid);
    if (ofi->cq)
        fi_close(&ofi->cq->fid);
    if (ofi->av)
        fi_close(&ofi->av->fid);
    if (ofi->domain)
        fi_close(&ofi->domain->fid);
    if (ofi->fabric)
        fi_close(&ofi->fabric->fid);
    if (ofi->info)
        fi.freeinfo(ofi->info);
    free(ofi);
}

#define TRY(name, expression)                                                                                            \
    do {                                                                                                                 \
        *call = name;                                                                                                    \
        int error = (expression);                                                                                        \
        if (error)                                                                                                       \
            return error;                                                                                                \
    } while (0)

static int has_atomics(struct fid_ep *ep) {
    size_t count = 0;
    int error = fi_atomicvalid(ep, FI_UINT64, FI_ATOMIC_WRITE, &count);
    if (!error)
        error = fi_atomicvalid(ep, FI_UINT64, FI_SUM, &count);
    if (!error)
        error = fi_fetch_atomicvalid(ep, FI_UINT64, FI_SUM, &count);
    return error;
}

static int make(struct aristos_ofi *ofi, const char *provider, const char *node, uint64_t choice, void *heap,
                uint64_t heap_bytes, uint64_t key, uint64_t n_pes, struct aristos_ofi_facts *facts, const char **call) {
    TRY("fi_getinfo", choose(provider, node, choice, &ofi->info));
    struct fi_info *info = ofi->info;
    TRY("fi_fabric", fi.fabric(info->fabric_attr, &ofi->fabric, NULL));
    TRY("fi_domain", fi_domain(ofi->fabric, info, &ofi->domain, NULL));

    struct fi_cq_attr cq = {.format = FI_CQ_FORMAT_CONTEXT, .wait_obj = FI_WAIT_FD, .size = 2 * info->tx_attr->size};
    facts->fd = -1;
    *call = "fi_cq_open";
    if (fi_cq_open(ofi->domain, &cq, &ofi->cq, NULL) == 0) {
        int fd = -1;
        if (fi_control(&ofi->cq->fid, FI_GETWAIT, &fd) == 0)
            facts->fd = fd;
    } else {
        cq.wait_obj = FI_WAIT_NONE;
        TRY("fi_cq_open", fi_cq_open(ofi->domain, &cq, &ofi->cq, NULL));
    }
    struct fi_av_attr av = {.type = FI_AV_TABLE, .count = n_pes};
    TRY("fi_av_open", fi_av_open(ofi->domain, &av, &ofi->av, NULL));
    TRY("fi_endpoint", fi_endpoint(ofi->domain, info, &ofi->ep, NULL));
    TRY("fi_ep_bind", fi_ep_bind(ofi->ep, &ofi->av->fid, 0));
    TRY("fi_ep_bind", fi_ep_bind(ofi->ep, &ofi->cq->fid, FI_TRANSMIT | FI_RECV));
    TRY("fi_enable", fi_enable(ofi->ep));
    TRY("fi_atomicvalid", has_atomics(ofi->ep));

    // The key is a secret of the job, if the provider lets the application choose it.
    size_t key_bytes = info->domain_attr->mr_key_size;
    if (key_bytes < 8)
        key &= (UINT64_C(1) << (8 * key_bytes)) - 1;
    uint64_t access = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
    TRY("fi_mr_reg", fi_mr_reg(ofi->domain, heap, heap_bytes, access, 0, key, 0, &ofi->mr, NULL));
    if (info->domain_attr->mr_mode & FI_MR_ENDPOINT) {
        TRY("fi_mr_bind", fi_mr_bind(ofi->mr, &ofi->ep->fid, 0));
        TRY("fi_mr_enable", fi_mr_enable(ofi->mr));
    }

    size_t address_bytes = ADDRESS_BYTES;
    TRY("fi_getname", fi_getname(&ofi->ep->fid, facts->address, &address_bytes));
    facts->address_bytes = address_bytes;
    strncpy(facts->provider, info->fabric_attr->prov_name, NAME_BYTES - 1);
    facts->base = info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uint64_t)(uintptr_t)heap : 0;
    facts->key = fi_mr_key(ofi->mr);
    facts->max_message_bytes = info->ep_attr->max_msg_size;
    facts->protocol = info->ep_attr->protocol;
    facts->protocol_version = info->ep_attr->protocol_version;
    return 0;
}

// Opens an endpoint and registers the heap. On an error `call` names the function that failed.
int aristos_ofi_open(const char *provider, const char *node, uint64_t choice, void *heap, uint64_t heap_bytes,
                     uint64_t key, uint64_t n_pes, struct aristos_ofi **made, struct aristos_ofi_facts *facts,
                     const char **call) {
    struct aristos_ofi *ofi = calloc(1, sizeof *ofi);
    if (!ofi)
        return -FI_ENOMEM;
    memset(facts, 0, sizeof *facts);
    int error = make(ofi, provider, node, choice, heap, heap_bytes, key, n_pes, facts, call);
    if (error) {
        aristos_ofi_close(ofi);
        return error;
    }
    *made = ofi;
    return 0;
}

// Registers another PE's address, which is as long as this PE's.
int aristos_ofi_insert(struct aristos_ofi *ofi, const void *address, uint64_t *to) {
    fi_addr_t inserted = FI_ADDR_UNSPEC;
    int count = fi_av_insert(ofi->av, address, 1, &inserted, 0, NULL);
    *to = inserted;
    return count == 1 ? 0 : count < 0 ? count : -FI_EINVAL;
}

int aristos_ofi_post(struct aristos_ofi *ofi, const struct aristos_ofi_op *op) {
    switch (op->kind) {
    case WRITE:
        return (int)fi_write(ofi->ep, op->buffer, op->bytes, NULL, op->to, op->at, op->key, op->context);
    case READ:
        return (int)fi_read(ofi->ep, op->buffer, op->bytes, NULL, op->to, op->at, op->key, op->context);
    case SET:
    case ADD: {
        enum fi_op what = op->kind == SET ? FI_ATOMIC_WRITE : FI_SUM;
        return (int)fi_atomic(ofi->ep, op->buffer, 1, NULL, op->to, op->at, op->key, FI_UINT64, what, op->context);
    }
    case FETCH_ADD:
        return (int)fi_fetch_atomic(ofi->ep, op->buffer, 1, NULL, op->result, NULL, op->to, op->at, op->key, FI_UINT64,
                                    FI_SUM, op->context);
    default:
        return -FI_EINVAL;
    }
}

// Reads at most `most` completions (32 per call) and progresses libfabric, including peers' operations on this heap. Returns
// their number, or an error of the queue itself.
int aristos_ofi_poll(struct aristos_ofi *ofi, struct aristos_ofi_done *done, uint64_t most) {
    struct fi_cq_entry entries[32];
    ssize_t count = fi_cq_read(ofi->cq, entries, most < 32 ? most : 32);
    if (count == -FI_EAGAIN)
        return 0;
    if (count == -FI_EAVAIL) {
        struct fi_cq_err_entry failed;
        memset(&failed, 0, sizeof failed);
        ssize_t read = fi_cq_readerr(ofi->cq, &failed, 0);
        if (read == -FI_EAGAIN)
            return 0;
        if (read < 0)
            return (int)read;
        done->context = failed.op_context;
        done->error = failed.err ? failed.err : FI_EOTHER;
        done->text[0] = 0;
        const char *text = fi_cq_strerror(ofi->cq, failed.prov_errno, failed.err_data, NULL, 0);
        if (text)
            strncpy(done->text, text, TEXT_BYTES - 1);
        done->text[TEXT_BYTES - 1] = 0;
        return 1;
    }
    for (ssize_t i = 0; i < count; i++) {
        done[i].context = entries[i].op_context;
        done[i].error = 0;
    }
    return (int)count;
}

// Whether the descriptor may be waited on: 0, or -FI_EAGAIN if there is work to do first.
int aristos_ofi_trywait(struct aristos_ofi *ofi) {
    struct fid *fids[1] = {&ofi->cq->fid};
    return fi_trywait(ofi->fabric, fids, 1);
}

const char *aristos_ofi_strerror(int error) { return fi.strerror(error); }

// Error numbers used by Rust.
const int aristos_ofi_eagain = FI_EAGAIN;
const int aristos_ofi_enodata = FI_ENODATA;
