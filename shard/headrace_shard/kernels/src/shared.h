// A shard group on one host, as the other kernels see it.
#pragma once

#include <cstdint>

namespace headrace {

class SharedGroup;

// Waits for a meeting to which this rank came without waiting: 0, or why it will not come about.
uint32_t wait(SharedGroup* group);

// Where this rank's part of the next sum belongs.
float* room_of(const SharedGroup* group);

// out = [residual +] the sum over the parts of all ranks; see SharedGroup::sum. 0, or why there is none.
uint32_t sum(SharedGroup* group, const uint8_t* halves, const float* residual, float* out, int64_t count);

}  // namespace headrace
