// An errno on its way out of a constructor. Nothing of this kind leaves the library: see api.cpp.

#pragma once

namespace ds_aio {

struct SystemError {
    explicit SystemError(int code) : code(code) {}
    int code;
};

}  // namespace ds_aio
