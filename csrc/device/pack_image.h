// Gives the compiled pack kernel, if the build found a compiler for it.
#pragma once

namespace vescale_ckpt::device {

// Returns an image for CUDA's driver; nullptr if the build had no compiler for it.
const unsigned char* pack_image();

}  // namespace vescale_ckpt::device
