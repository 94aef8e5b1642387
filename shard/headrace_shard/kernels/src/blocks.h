// Rows of GGUF tensors into panels, without rounding anything again (but Q4_K's scales, which are products).
#pragma once

#include <cstdint>

namespace headrace {

void pack_blocks(
    int kind, const uint8_t* raw, int64_t row_bytes, const int32_t* order, int64_t rows, int64_t first_group, int64_t groups,
    uint8_t* out);

}  // namespace headrace
