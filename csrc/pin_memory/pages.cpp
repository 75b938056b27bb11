// Memory for transfers: whole pages of the process's own, locked where the system allows it.

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

// Returns 0 or -errno. lock_error is 0 where the pages are locked, else the errno of the attempt; they are usable still.
int ds_pages_map(uint64_t n_bytes, void** address, int32_t* lock_error)
{
    void* pages = mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) { return -errno; }
    // Fewer, larger pages cost the kernel less for each transfer. Only a hint.
    madvise(pages, n_bytes, MADV_HUGEPAGE);
    *lock_error = mlock(pages, n_bytes) == 0 ? 0 : errno;
    *address = pages;
    return 0;
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
