// Memory for transfers: whole pages of the process's own, locked where the system allows it.

#include "pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

namespace ds_pages {
namespace {

constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;  // of most architectures; elsewhere no harm is done

}  // namespace

int map(uint64_t n_bytes, void** address)
{
    // Newer kernels align by themselves. For the others more is mapped than is wanted, and trimmed.
    const auto page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    const uint64_t used_bytes = (n_bytes + page_bytes - 1) / page_bytes * page_bytes;
    const uint64_t slack_bytes = n_bytes >= kHugePageBytes ? kHugePageBytes : 0;
    void* mapped =
        mmap(nullptr, used_bytes + slack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) { return -errno; }
    char* pages = static_cast<char*>(mapped);
    if (slack_bytes > 0) {
        const uint64_t before_bytes = (kHugePageBytes - reinterpret_cast<uint64_t>(pages) % kHugePageBytes) % kHugePageBytes;
        const uint64_t after_bytes = slack_bytes - before_bytes;
        if (before_bytes > 0) { munmap(pages, before_bytes); }
        pages += before_bytes;
        if (after_bytes > 0) { munmap(pages + used_bytes, after_bytes); }
    }
    madvise(pages, n_bytes, MADV_HUGEPAGE);
    *address = pages;
    return 0;
}

}  // namespace ds_pages

#pragma GCC visibility push(default)
extern "C" {

// Returns 0 or -errno. lock_error is 0 where the pages are locked, else the errno of the attempt; they are usable still.
int ds_pages_map(uint64_t n_bytes, void** address, int32_t* lock_error)
{
    const int outcome = ds_pages::map(n_bytes, address);
    if (outcome == 0) { *lock_error = mlock(*address, n_bytes) == 0 ? 0 : errno; }
    return outcome;
}

// Unlocks the pages and gives them back; the addresses stay valid, and read as zeros.
int ds_pages_empty(void* address, uint64_t n_bytes)
{
    munlock(address, n_bytes);
    return madvise(address, n_bytes, MADV_DONTNEED) == 0 ? 0 : -errno;
}

int ds_pages_unmap(void* address, uint64_t n_bytes) { return munmap(address, n_bytes) == 0 ? 0 : -errno; }

}  // extern "C"
#pragma GCC visibility pop
