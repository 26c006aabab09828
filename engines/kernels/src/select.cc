#include "select.h"

#include <cstdlib>
#include <cstring>

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace specexport {
namespace {

const Kernels& choose() {
  const char* wanted = std::getenv("SPECEXPORT_KERNELS_ISA");
  const auto takes = [wanted](const Kernels& each) {
    return wanted == nullptr || *wanted == '\0' || std::strcmp(wanted, each.name) == 0;
  };
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
  if (avx512 && takes(kAvx512)) return kAvx512;
  if (avx2 && takes(kAvx2)) return kAvx2;
#elif defined(__aarch64__)
#if defined(__linux__)
  const bool dot = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  const bool dot = true;  // every 64-bit Apple processor of note
#endif
  if (dot && takes(kNeon)) return kNeon;
#endif
  return kGeneric;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace specexport

extern "C" __attribute__((visibility("default"))) const char* specexport_kernels_isa() {
  return specexport::kernels().name;
}
