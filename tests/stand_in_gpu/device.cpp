// A GPU made of host memory, for tests: torch's PrivateUse1 backend with two devices.
//
// Streams are queues with a thread each, so copies and results really are late. Memory is handed out in the order of the stream that
// asked for it and is worthless (0xFF) until written. Pinned memory is told apart, and only copies from or to it are asynchronous.
// A host tensor among a device's tensors is refused, as CUDA does. Every operator is computed by the CPU's kernel.
// Counters say what a test asks for: bytes in use and at the peak, contexts, operators.
//
// What it cannot show: kernels of a real device, their speed, PCIe, a driver's errors.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_cpu_dispatch.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace {

constexpr int kDevices = 2;
constexpr auto kType = c10::DeviceType::PrivateUse1;

// How late copies from and to pinned memory end, and results of operators.
std::atomic<double> copy_delay_s{2e-4}, result_delay_s{0};
std::atomic<long> operators{0}, blocking_bytes{0};  // of copies between host and device that the host waited for
std::atomic<bool> has_context[kDevices];
thread_local int current_device = 0;
thread_local bool in_operator = false;  // its copies are no copies: a real device computes on what it has
thread_local int current_stream[kDevices] = {0, 1};  // the first kDevices streams are the default ones

void sleep_s(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// Work in order, done by a thread of its own.
class Stream {
 public:
  Stream() { std::thread([this] { run(); }).detach(); }

  void add(std::function<void()> work) {
    std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back(std::move(work));
    ++added_;
    changed_.notify_all();
  }
  uint64_t added() {
    std::lock_guard<std::mutex> lock(mutex_);
    return added_;
  }
  bool is_done(uint64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ >= number;
  }
  void wait(uint64_t number) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= number; });
  }
  void wait_all() { wait(added()); }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !waiting_.empty(); });
      auto work = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      work();
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  uint64_t added_ = 0, done_ = 0;
};

std::mutex streams_mutex;
std::vector<Stream*> streams;      // never deleted: their threads run to the end of the process
std::vector<int> device_of_stream;

int new_stream(int device) {
  std::lock_guard<std::mutex> lock(streams_mutex);
  for (int d = 0; streams.empty() && d < kDevices; ++d) device_of_stream.push_back(d);
  while (streams.size() < device_of_stream.size()) streams.push_back(new Stream);
  streams.push_back(new Stream);
  device_of_stream.push_back(device);
  return int(streams.size()) - 1;
}

Stream& stream(int number) {
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    if (!streams.empty()) return *streams.at(number);
  }
  new_stream(0);
  return stream(number);
}

Stream& stream_of(int device) { return stream(current_stream[device]); }

void synchronize(int device) {
  std::vector<Stream*> all;
  {
    std::lock_guard<std::mutex> lock(streams_mutex);
    for (size_t i = 0; i < streams.size(); ++i)
      if (device_of_stream[i] == device) all.push_back(streams[i]);
  }
  for (Stream* one : all) one->wait_all();
}

// Device memory: blocks of 512 bytes' multiples, kept for reuse as torch's caching allocators do.
struct Pool {
  std::multimap<size_t, void*> free;
  size_t used = 0, peak = 0, reserved = 0, limit = SIZE_MAX;
  std::string shortage = "HIP out of memory.";  // what an allocation beyond the limit says
};
std::mutex memory_mutex;
Pool pools[kDevices];
std::unordered_map<void*, std::pair<int, size_t>> blocks;

void free_block(void* block) {
  if (block == nullptr) return;
  std::lock_guard<std::mutex> lock(memory_mutex);
  auto [device, size] = blocks.at(block);
  pools[device].used -= size;
  pools[device].free.emplace(size, block);
}

void empty_cache(int device) {
  synchronize(device);
  std::lock_guard<std::mutex> lock(memory_mutex);
  for (auto& [size, block] : pools[device].free) {
    pools[device].reserved -= size;
    blocks.erase(block);
    std::free(block);
  }
  pools[device].free.clear();
}

void* take_block(int device, size_t size) {
  std::lock_guard<std::mutex> lock(memory_mutex);
  Pool& pool = pools[device];
  if (pool.used + size > pool.limit) throw std::runtime_error(pool.shortage);
  auto found = pool.free.find(size);
  void* block = nullptr;
  if (found != pool.free.end()) {
    block = found->second;
    pool.free.erase(found);
  } else {
    block = std::aligned_alloc(512, size);
    blocks[block] = {device, size};
    pool.reserved += size;
  }
  pool.used += size;
  pool.peak = std::max(pool.peak, pool.used);
  return block;
}

struct DeviceAllocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    const int device = current_device;
    has_context[device] = true;
    if (bytes == 0) return {nullptr, nullptr, &free_block, at::Device(kType, device)};
    const size_t size = (bytes + 511) / 512 * 512;
    void* block = take_block(device, size);
    // Whoever had the block before may still read it, in the order of this stream.
    stream_of(device).add([block, size] { std::memset(block, 0xFF, size); });
    return {block, block, &free_block, at::Device(kType, device)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kType, &device_allocator);

// Pinned host memory. torch's allocator rounds every block up to a power of two and never returns it; memory of others is registered.
std::mutex pinned_mutex;
std::map<char*, size_t> pinned;
size_t pinned_bytes = 0, registered_bytes = 0, most_registered_bytes = 0, register_limit = SIZE_MAX;
thread_local bool refused = false;  // as CUDA's last error: the next kernel of the thread that launches raises it

int register_host(size_t address, size_t bytes) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  if ((refused = registered_bytes + bytes > register_limit)) return 2;  // cudaErrorMemoryAllocation
  pinned[reinterpret_cast<char*>(address)] = bytes;
  registered_bytes += bytes;
  most_registered_bytes = std::max(most_registered_bytes, registered_bytes);
  return 0;
}

int unregister_host(size_t address) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto found = pinned.find(reinterpret_cast<char*>(address));
  if (found == pinned.end()) return 713;  // cudaErrorHostMemoryNotRegistered
  registered_bytes -= found->second;
  pinned.erase(found);
  return 0;
}

size_t power_of_two(size_t bytes) {
  size_t size = 1;
  while (size < bytes) size *= 2;
  return size;
}

void free_pinned(void* memory) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  pinned.erase(static_cast<char*>(memory));
  std::free(memory);
}

bool is_pinned(const void* memory) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned.upper_bound(static_cast<char*>(const_cast<void*>(memory)));
  if (after == pinned.begin()) return false;
  --after;
  return static_cast<const char*>(memory) < after->first + after->second;
}

struct PinnedAllocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &free_pinned, at::Device(at::kCPU)};
    void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    std::memset(memory, 0xEE, bytes);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[static_cast<char*>(memory)] = bytes;
    pinned_bytes += power_of_two(bytes);
    return {memory, memory, &free_pinned, at::Device(at::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedAllocator pinned_allocator;

using Recorded = std::pair<int, uint64_t>;  // a stream and how much of its work an event stands behind

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, c10::DeviceIndex(current_device)}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    const int index = device.index() < 0 ? current_device : device.index();
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, c10::DeviceIndex(index)), current_stream[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, device.index());
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    auto before = getStream(to.device());
    current_stream[to.device_index()] = int(to.id());
    return before;
  }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = new Recorded(int(on.id()), stream(int(on.id())).added());
  }
  void block(void* event, const c10::Stream& on) const override {
    auto [number, position] = *static_cast<Recorded*>(event);
    Stream* awaited = &stream(number);
    stream(int(on.id())).add([awaited, position = position] { awaited->wait(position); });
  }
  bool queryEvent(void* event) const override {
    auto [number, position] = *static_cast<Recorded*>(event);
    return stream(number).is_done(position);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Recorded*>(event); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize(device); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return has_context[device]; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current_device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto fresh = device_allocator.allocate(bytes);
    stream_of(current_device).wait_all();
    std::memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
    const_cast<c10::Storage&>(storage).set_data_ptr_noswap(std::move(fresh));
    const_cast<c10::Storage&>(storage).set_nbytes(bytes);
  }
};
Hooks hooks;

at::Tensor as_host(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const int device = (to.is_cpu() ? from : to).device().index();
  has_context[device] = true;
  Stream& on = stream_of(device);
  const bool between = from.is_cpu() || to.is_cpu();
  const bool plain = from.is_contiguous() && to.is_contiguous() && from.dtype() == to.dtype() && from.sizes() == to.sizes();
  if (non_blocking && between && plain && is_pinned(from.is_cpu() ? from.data_ptr() : to.data_ptr())) {
    void* target = to.data_ptr();
    const void* source = from.data_ptr();
    const size_t bytes = from.nbytes();
    on.add([target, source, bytes] {
      sleep_s(copy_delay_s);
      std::memcpy(target, source, bytes);
    });
    return to;
  }
  if (between && !in_operator) blocking_bytes += from.nbytes();
  on.wait_all();
  at::Tensor target = to.is_cpu() ? to : as_host(to);
  target.copy_(from.is_cpu() ? from : as_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  stream_of(tensor.device().index()).wait_all();
  return at::cpu::_local_scalar_dense(as_host(tensor));
}

// The device of an operator's tensors (-1: none is on a device). Host tensors with dimensions among them are refused.
int device_of(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  int device = -1;
  auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != kType) return;
    TORCH_CHECK(device < 0 || device == tensor.device().index(), "tensors on two devices in ", op.schema().name());
    device = tensor.device().index();
  };
  for (const auto& argument : arguments) {
    if (argument.isTensor()) look(argument.toTensor());
    if (argument.isTensorList())
      for (const at::Tensor& tensor : argument.toTensorList()) look(tensor);
  }
  if (device < 0) return device;
  for (const auto& argument : arguments) {
    if (!argument.isTensor()) continue;
    const at::Tensor& tensor = argument.toTensor();
    TORCH_CHECK(!tensor.defined() || tensor.device().type() == kType || tensor.dim() == 0, "a host tensor of ",
                tensor.sizes(), " among the device's in ", op.schema().name());
  }
  return device;
}

// Take a result away until the stream has come so far.
void delay(const at::Tensor& result, Stream& on) {
  if (!result.defined() || result.device().type() != kType || !result.is_contiguous() || result.numel() == 0) return;
  void* memory = result.data_ptr();
  const size_t bytes = result.nbytes();
  auto kept = std::make_shared<std::vector<char>>(static_cast<char*>(memory), static_cast<char*>(memory) + bytes);
  std::memset(memory, 0xFF, bytes);
  on.add([memory, kept, bytes] {
    sleep_s(result_delay_s);
    std::memcpy(memory, kept->data(), bytes);
  });
}

// STAND_IN_GPU_FAULT="DEVICE OPERATOR wrong|nan|error|crash|hang": what that operator does on that device ("1 aten::mm nan").
struct Fault {
  int device = -1;
  std::string op, kind;
  Fault() {
    if (const char* text = std::getenv("STAND_IN_GPU_FAULT")) std::istringstream(text) >> device >> op >> kind;
  }
};

void spoil(const at::Tensor& result, const std::string& kind) {
  if (!result.defined() || !result.is_floating_point()) return;
  at::Tensor memory = result.is_cpu() ? result : as_host(result);
  kind == "nan" ? memory.fill_(NAN) : memory.mul_(1.5);
}

void compute_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const Fault fault;
  int device = device_of(op, torch::jit::last(*stack, op.schema().arguments().size()));
  if (device < 0) device = current_device;
  has_context[device] = true;
  TORCH_CHECK(!std::exchange(refused, false), "CUDA error: out of memory");
  ++operators;
  Stream& on = stream_of(device);
  on.wait_all();
  const bool faulty = device == fault.device && op.schema().name() == fault.op;
  TORCH_CHECK(!faulty || fault.kind != "error", "CUDA error: no kernel image is available for execution on the device");
  if (faulty && fault.kind == "crash") std::raise(SIGSEGV);
  if (faulty && fault.kind == "hang") sleep_s(1e6);
  c10::OptionalDeviceGuard guard(c10::Device(kType, c10::DeviceIndex(device)));
  in_operator = true;
  at::native::cpu_fallback(op, stack);
  in_operator = false;
  on.wait_all();
  if (faulty)
    for (const auto& result : torch::jit::last(*stack, op.schema().returns().size()))
      if (result.isTensor()) spoil(result.toTensor(), fault.kind);
  if (result_delay_s <= 0) return;
  for (const auto& result : torch::jit::last(*stack, op.schema().returns().size()))
    if (result.isTensor()) delay(result.toTensor(), on);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("_has_compatible_shallow_copy_type", [](const at::Tensor&, const at::Tensor&) { return true; });
  m.impl("as_strided", [](const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                          std::optional<c10::SymInt> offset) { return at::cpu::as_strided_symint(t, size, stride, offset); });
  m.impl("resize_", [](const at::Tensor& t, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format)
                        -> const at::Tensor& { return at::native::resize_(t, C10_AS_INTARRAYREF_SLOW(size), format); });
  m.impl("_reshape_alias", [](const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  });
  m.impl("view", [](const at::Tensor& t, c10::SymIntArrayRef size) {
    return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size));
  });
  m.impl("unfold", [](const at::Tensor& t, int64_t dimension, int64_t size, int64_t step) {
    return at::native::unfold(t, dimension, size, step);
  });
  m.impl("set_.source_Tensor",
         [](at::Tensor& t, const at::Tensor& source) -> at::Tensor& { return at::native::set_tensor_(t, source); });
  m.impl("set_.source_Storage", [](at::Tensor& t, at::Storage s) -> at::Tensor& { return at::native::set_(t, s); });
  m.impl("set_.source_Storage_storage_offset",
         [](at::Tensor& t, at::Storage s, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) -> at::Tensor& {
           return at::cpu::set_(t, s, offset, size, stride);
         });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("DEVICES") = kDevices;
  m.def("register_hooks", [] { at::RegisterPrivateUse1HooksInterface(&hooks); });
  m.def("current_device", [] { return current_device; });
  m.def("set_device", [](int device) { current_device = device; has_context[device] = true; });
  m.def("maybe_set_device", [](int device) { current_device = device; });
  m.def("new_stream", &new_stream);
  m.def("current_stream", [](int device) { return current_stream[device]; });
  m.def("set_stream", [](int device, int number) { current_stream[device] = number; });
  m.def("added", [](int number) { return stream(number).added(); });
  m.def("is_done", [](int number, uint64_t position) { return stream(number).is_done(position); });
  m.def("wait", [](int number, uint64_t position) { stream(number).wait(position); },
        py::call_guard<py::gil_scoped_release>());
  m.def("wait_for", [](int number, int other, uint64_t position) {
    Stream* awaited = &stream(other);
    stream(number).add([awaited, position] { awaited->wait(position); });
  });
  m.def("stamp", [](int number) {  // the time at which the stream comes to here, once it has
    auto when = std::make_shared<std::atomic<double>>(0.0);
    stream(number).add([when] {
      *when = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    });
    return std::function<double()>([when] { return when->load(); });
  });
  m.def("synchronize", &synchronize, py::call_guard<py::gil_scoped_release>());
  m.def("compute_for", [](int number, double seconds) { stream(number).add([seconds] { sleep_s(seconds); }); });
  m.def("set_delays", [](double copy_s, double result_s) { copy_delay_s = copy_s; result_delay_s = result_s; });
  m.def("contexts", [] { return std::vector<bool>(std::begin(has_context), std::end(has_context)); });
  m.def("operators", [] { return operators.load(); });
  m.def("blocking_bytes", [] { return blocking_bytes.load(); });
  m.def("pinned_bytes", [] { return pinned_bytes; });
  m.def("register_host", &register_host);
  m.def("unregister_host", &unregister_host);
  m.def("registered_bytes", [] { return registered_bytes; });
  m.def("most_registered_bytes", [] { return most_registered_bytes; });
  m.def("set_register_limit", [](size_t bytes) { register_limit = bytes; });
  m.def("empty_cache", &empty_cache, py::call_guard<py::gil_scoped_release>());
  m.def("used", [](int device) { std::lock_guard<std::mutex> lock(memory_mutex); return pools[device].used; });
  m.def("peak", [](int device) { std::lock_guard<std::mutex> lock(memory_mutex); return pools[device].peak; });
  m.def("reserved", [](int device) { std::lock_guard<std::mutex> lock(memory_mutex); return pools[device].reserved; });
  m.def("reset_peak", [](int device) {
    std::lock_guard<std::mutex> lock(memory_mutex);
    pools[device].peak = pools[device].used;
  });
  m.def("set_limit", [](int device, size_t bytes, const std::string& shortage) {
    std::lock_guard<std::mutex> lock(memory_mutex);
    pools[device].limit = bytes;
    pools[device].shortage = shortage;
  });
}
