// Compares functions that the engine declares by hand with those of a runtime's own headers.
#pragma once

#include <type_traits>

namespace vescale_ckpt::device::cuda {

// Passed alike: pointers and handles as pointers, enums and numbers of one size.
template <typename Ours, typename Theirs>
constexpr bool passes_as() {
  constexpr bool numbers =
      (std::is_integral_v<Ours> || std::is_enum_v<Ours>) && (std::is_integral_v<Theirs> || std::is_enum_v<Theirs>);
  constexpr bool pointers = std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>;
  if constexpr (pointers) {
    using OursTo = std::remove_cv_t<std::remove_pointer_t<Ours>>;
    using TheirsTo = std::remove_cv_t<std::remove_pointer_t<Theirs>>;
    if constexpr (std::is_void_v<OursTo> || std::is_void_v<TheirsTo> || std::is_class_v<OursTo>) {
      return true;  // handles are opaque; structures are compared below
    } else {
      return passes_as<OursTo, TheirsTo>();
    }
  }
  return numbers && sizeof(Ours) == sizeof(Theirs);
}

template <typename Ours, typename Theirs>
struct SameCall : std::false_type {};
template <typename OurResult, typename TheirResult, typename... Ours, typename... Theirs>
  requires(sizeof...(Ours) == sizeof...(Theirs))
struct SameCall<OurResult (*)(Ours...), TheirResult (*)(Theirs...)>
    : std::bool_constant<passes_as<OurResult, TheirResult>() && (passes_as<Ours, Theirs>() && ...)> {};

}  // namespace vescale_ckpt::device::cuda
