#include "packed.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <iterator>
#include <mutex>
#include <new>
#include <unordered_map>

#include "select.h"

namespace specexport {
namespace {

constexpr size_t kPage = size_t{2} << 20;

size_t aligned(size_t bytes) { return (bytes + 63) & ~size_t{63}; }

// Large matrices lie in large pages: reading them once a token is most of the work, and small pages cost a walk each.
void* allocate(size_t bytes) {
  const size_t unit = bytes >= kPage / 2 ? kPage : 64;
  void* memory = std::aligned_alloc(unit, (bytes + unit - 1) / unit * unit);
  if (memory == nullptr) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  if (unit == kPage) madvise(memory, (bytes + unit - 1) / unit * unit, MADV_HUGEPAGE);
#endif
  return memory;
}

}  // namespace

PackedMatrix::PackedMatrix(const uint8_t* codes, const float* scales, const uint8_t* zeros, int outputs, int width,
                           int block, int bits, bool alternate) {
  const int blocks = (width + block - 1) / block, panels = (outputs + kLanes - 1) / kLanes;
  bool row_scales = true;
  for (int n = 0; n < outputs && row_scales; ++n)
    for (int b = 1; b < blocks && row_scales; ++b)
      row_scales = scales[static_cast<size_t>(n) * blocks + b] == scales[static_cast<size_t>(n) * blocks];
  const bool shifted = bits == 8 && kernels().signed_codes;
  const int middle = 1 << (bits - 1), per_byte = 8 / bits;
  const size_t panel_bytes = static_cast<size_t>(blocks) * block * kLanes * bits / 8;
  const size_t code_bytes = aligned(panel_bytes * panels);
  const size_t scale_count = static_cast<size_t>(panels) * kLanes * (row_scales ? 1 : blocks);
  const size_t zero_count = zeros == nullptr ? 0 : static_cast<size_t>(panels) * kLanes * blocks;
  bytes_ = code_bytes + aligned(4 * scale_count) + aligned(4 * zero_count);
  memory_ = allocate(bytes_);
  auto* packed = static_cast<uint8_t*>(memory_);
  auto* packed_scales = reinterpret_cast<float*>(packed + code_bytes);
  auto* packed_zeros = reinterpret_cast<int32_t*>(packed + code_bytes + aligned(4 * scale_count));
  const size_t row_bytes = static_cast<size_t>(blocks) * block / per_byte;
  const size_t zero_bytes = (static_cast<size_t>(blocks) + per_byte - 1) / per_byte;
  for (int p = 0; p < panels; ++p) {
    uint8_t* to = packed + static_cast<size_t>(p) * panel_bytes;
    for (int lane = 0; lane < kLanes; ++lane) {
      int n = p * kLanes + lane;
      if (alternate) n = p / 2 * kLanes + lane + (p % 2) * (outputs / 2);
      const bool real = n < outputs;
      const uint8_t* from = codes + static_cast<size_t>(n) * row_bytes;
      for (size_t k = 0; k < row_bytes; k += 4) {  // bytes of a row: four codes of 8 bits, eight of 4
        uint8_t four[4];
        if (real)
          std::memcpy(four, from + k, 4);
        else
          std::memset(four, bits == 8 ? middle : middle * 17, 4);
        if (bits == 8) {
          for (uint8_t& each : four) each = static_cast<uint8_t>(shifted ? each - 128 : each);
        } else {  // codes 0 to 7 in order, the first in the low half, become 0 | 4, 1 | 5, 2 | 6, 3 | 7
          uint8_t code[8];
          for (int i = 0; i < 8; ++i) code[i] = (four[i / 2] >> (4 * (i % 2))) & 15;
          for (int i = 0; i < 4; ++i) four[i] = static_cast<uint8_t>(code[i] | code[i + 4] << 4);
        }
        std::memcpy(to + k * kLanes + 4 * lane, four, 4);
      }
      for (int b = 0; b < (row_scales ? 1 : blocks); ++b)
        packed_scales[(static_cast<size_t>(p) * (row_scales ? 1 : blocks) + b) * kLanes + lane] =
            real ? scales[static_cast<size_t>(n) * blocks + b] : 0.0f;
      for (int b = 0; b < blocks && zeros != nullptr; ++b) {
        int zero = middle;
        if (real) {
          const uint8_t byte = zeros[static_cast<size_t>(n) * zero_bytes + b / per_byte];
          zero = bits == 8 ? byte : (byte >> (4 * (b % 2))) & 15;
        }
        packed_zeros[(static_cast<size_t>(p) * blocks + b) * kLanes + lane] = zero - (shifted ? 128 : 0);
      }
    }
  }
  view_ = {packed,  packed_scales,          zeros == nullptr ? nullptr : packed_zeros,
           middle - (shifted ? 128 : 0), outputs, blocks * block, block, blocks, bits, panels, row_scales};
}

PackedMatrix::~PackedMatrix() { std::free(memory_); }

std::shared_ptr<const PackedMatrix> PackedMatrix::kept(std::shared_ptr<const PackedMatrix> made) {
  // Never destroyed: sessions may outlive what the end of a process destroys.
  static auto& mutex = *new std::mutex;
  static auto& all = *new std::unordered_multimap<uint64_t, std::weak_ptr<const PackedMatrix>>;
  const uint64_t digest = made->digest();
  const std::lock_guard<std::mutex> lock(mutex);
  auto [each, end] = all.equal_range(digest);
  while (each != end) {
    const auto found = each->second.lock();
    if (found != nullptr && *found == *made) return found;
    each = found == nullptr ? all.erase(each) : std::next(each);
  }
  all.emplace(digest, made);
  return made;
}

uint64_t PackedMatrix::digest() const {
  uint64_t state = bytes_;
  for (size_t i = 0; i < bytes_; i += sizeof state) {  // memory is a multiple of 64 bytes
    uint64_t word;
    std::memcpy(&word, static_cast<const char*>(memory_) + i, sizeof word);
    state = (state ^ word) * 0x9E3779B97F4A7C15;
    state ^= state >> 29;
  }
  return state;
}

bool PackedMatrix::operator==(const PackedMatrix& other) const {
  const Matrix &a = view_, &b = other.view_;
  return bytes_ == other.bytes_ && a.outputs == b.outputs && a.width == b.width && a.block == b.block &&
         a.bits == b.bits && a.row_scales == b.row_scales && a.zero == b.zero && !a.zeros == !b.zeros &&
         std::memcmp(memory_, other.memory_, bytes_) == 0;
}

}  // namespace specexport
