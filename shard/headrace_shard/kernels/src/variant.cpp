// Compiled once for each instruction set, with VARIANT as its name.
#include "layers.h"
#include "pack.h"
#include "vocabulary.h"

namespace headrace::VARIANT {

extern const Kernels kernels;
const Kernels kernels{kAttentionRows, kPromptTileRows, linear, mlp, pack, attention, scan, draw, mask, threshold};

}  // namespace headrace::VARIANT
