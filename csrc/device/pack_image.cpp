#include "device/pack_image.h"

namespace vescale_ckpt::device {

#ifdef VESCALE_CKPT_HAVE_PACK_IMAGE

const unsigned char* pack_image() {
  alignas(16) static constexpr unsigned char kImage[] = {
#include "pack_image.inc"  // written by setup.py
  };
  return kImage;
}

#else

const unsigned char* pack_image() {
  return nullptr;
}

#endif

}  // namespace vescale_ckpt::device
