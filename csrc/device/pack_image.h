// The compiled pack kernel, if the build found a compiler for it.
#pragma once

namespace vescale_ckpt::device {

// An image for CUDA's driver; nullptr if this was built without.
const unsigned char* pack_image();

}  // namespace vescale_ckpt::device
