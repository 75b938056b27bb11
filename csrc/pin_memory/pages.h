// Fresh pages for transfers.

#pragma once

#include <cstdint>

namespace ds_pages {

// Where the size allows it they lie so that the kernel can make them huge pages, and it is asked to: a transfer of
// scattered small pages is cut up where a device takes few segments at once, to half the speed or less. Returns 0 or
// -errno. Unmapped with munmap.
int map(uint64_t n_bytes, void** address);

}  // namespace ds_pages
