// A CUDA device in torch's CPU build: the dispatch key CUDA, the device guard, the hooks and the allocators, which that
// build leaves free. A tensor on "cuda:0" is torch's own CUDA tensor, with memory of the host. An operation on it is
// computed by the CPU's kernel, on an alias of that memory. README.md says what is seen and what is not.
//
// Time is one vector clock per stream. `known[s][t]` says how many operations of stream t are over before the next of
// stream s begins; `host[t]` says the same of the host. An access is unordered, a race, where that is not known.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace sim {
using at::Tensor;
using c10::IValue;
using Clock = std::vector<uint64_t>;
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

constexpr int STREAMS = 64;
constexpr size_t ALIGNMENT = 512;
const c10::Device GPU(c10::DeviceType::CUDA, 0);
const c10::Device CPU(c10::kCPU);

// ---- What is counted, and what is found

struct Counts {
  int64_t launches = 0, kernels = 0, views = 0, allocations = 0, syncs = 0, captures = 0, replays = 0, replayed = 0;
} counts;
std::map<std::string, int64_t> operations, syncs_at;
using Hazard = std::pair<std::string, std::string>;  // its kind, and what was done where
std::vector<Hazard> hazards;
py::object* where_function = nullptr;  // of Python: () -> "file:line < file:line"

std::string where() {
  if (!where_function || !Py_IsInitialized()) return "?";
  py::gil_scoped_acquire gil;
  try {
    return py::cast<std::string>((*where_function)());
  } catch (std::exception& error) {
    return std::string("? ") + error.what();
  }
}

// One lock for all state. It is never held while Python runs, since another thread may hold Python's and wait for this
// one. So hazards that are found under it are reported, with the place in Python's code, once it is released.
std::recursive_mutex mutex;
thread_local int depth = 0;
thread_local std::vector<Hazard> found;

void tell(std::vector<Hazard>& hazards_found);
struct Locked {
  Locked() {
    mutex.lock();
    depth++;
  }
  ~Locked() {
    std::vector<Hazard> mine;
    if (--depth == 0) mine.swap(found);
    mutex.unlock();
    if (!mine.empty()) tell(mine);
  }
};
void tell(std::vector<Hazard>& hazards_found) {
  std::string at = where();
  Locked locked;
  for (auto& [kind, what] : hazards_found) {
    Hazard whole(kind, what + "; seen at " + at);
    if (std::find(hazards.begin(), hazards.end(), whole) == hazards.end()) hazards.push_back(whole);
  }
}
void hazard(const std::string& kind, const std::string& what) {
  Locked locked;
  found.push_back({kind, what});
}

// ---- Streams

Clock known[STREAMS], host(STREAMS, 0);
const bool clocks_are_set = [] {
  for (auto& clock : known) clock.assign(STREAMS, 0);
  return true;
}();
int streams = 1;
thread_local int current = 0;

void learn(Clock& one, const Clock& other) {
  for (int i = 0; i < STREAMS; i++) one[i] = std::max(one[i], other[i]);
}
// An operation begins on stream s: the host has launched it, and so it comes behind all that the host knows to be over.
uint64_t tick(int s) {
  learn(known[s], host);
  return ++known[s][s];
}
int make_stream() {
  Locked locked;
  int made = streams++;
  return made < STREAMS ? made : 1 + made % (STREAMS - 1);
}

// ---- Graphs: what a capture has seen

struct Outside {  // memory that was there before the capture
  c10::weak_intrusive_ptr<c10::StorageImpl> alive;
  std::string seen_at;
  bool written = false;
};
struct Graph {
  int64_t id = 0;
  std::vector<std::function<void()>> nodes;
  std::map<const void*, Outside> outside;
  std::map<const void*, c10::Storage> pool;               // memory that the capture allocated
  std::map<const void*, std::vector<char>> before;        // what the capture must leave as it was
};
Graph* capture = nullptr;
int capture_stream = -1;
bool capturing() { return capture && current == capture_stream; }

// ---- Memory of the device

struct Block {
  size_t bytes;
  int stream;
  int64_t graph;                              // the capture that allocated it, or 0
  std::pair<int, uint64_t> written{-1, 0};    // by which stream, when
  std::map<int, uint64_t> read;               // by which streams, when
  std::set<int> recorded;                     // by record_stream
};
auto& blocks = *new std::unordered_map<const void*, Block>;  // memory may be freed after static objects are gone
int64_t allocated = 0, peak = 0, total_memory = 80ll << 30;

void touch(const void* base, bool writes, int s, uint64_t time) {
  auto it = blocks.find(base);
  if (it == blocks.end() || capturing()) return;  // a capture computes nothing
  Block& block = it->second;
  auto unordered = [&](int t, uint64_t at) { return t >= 0 && t != s && known[s][t] < at; };
  if (unordered(block.written.first, block.written.second))
    hazard("race", std::string(writes ? "write" : "read") + " after a write of another stream, unordered");
  if (!writes) {
    block.read[s] = time;
    return;
  }
  for (auto& [t, at] : block.read)
    if (unordered(t, at)) hazard("race", "write after a read of another stream, unordered");
  block.written = {s, time};
  block.read.clear();
}

void free_block(void* p) {
  Locked locked;
  auto it = blocks.find(p);
  if (it == blocks.end()) return;
  Block& block = it->second;
  auto check = [&](int t, uint64_t at) {
    if (t >= 0 && t != block.stream && std::max(known[block.stream][t], host[t]) < at && !block.recorded.count(t))
      hazard("free", "memory of a stream is freed while another may use it, without record_stream");
  };
  // A graph's memory goes back to its pool, which no other work uses, or by cudaFree, which waits for the device.
  if (!block.graph) {
    check(block.written.first, block.written.second);
    for (auto& [t, at] : block.read) check(t, at);
  }
  allocated -= block.bytes;
  blocks.erase(it);
  free(p);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, GPU};
    Locked locked;
    size_t bytes = (n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    bool fits = allocated + (int64_t)bytes <= total_memory;
    TORCH_CHECK_WITH(OutOfMemoryError, fits, "CUDA out of memory (simulated): ", n, " bytes more");
    void* p = aligned_alloc(ALIGNMENT, bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, p, "CUDA out of memory (simulated): no memory of the machine for ", n, " bytes");
    memset(p, 0xFF, bytes);  // NaN or -1: what nobody wrote, nobody may read
    blocks[p] = Block{bytes, current, capturing() ? capture->id : 0};
    allocated += bytes;
    peak = std::max(peak, allocated);
    counts.allocations++;
    return {p, p, &free_block, GPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
} device_allocator;

// ---- Pinned memory, and copies that are under way

auto& pinned = *new std::map<const char*, size_t>;  // bytes of each
bool is_pinned(const void* p) {
  Locked locked;
  auto it = pinned.upper_bound((const char*)p);
  return it != pinned.begin() && (--it, (const char*)p < it->first + it->second);
}
void free_pinned(void* p) {
  Locked locked;
  pinned.erase((const char*)p);
  free(p);
}
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, CPU};
    Locked locked;
    TORCH_CHECK(!capturing(), "CUDA error (simulated): pinned memory is allocated while a stream is capturing");
    size_t bytes = (n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    void* p = aligned_alloc(ALIGNMENT, bytes);
    pinned[(char*)p] = bytes;
    return {p, p, &free_pinned, CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
} pinned_allocator;

// A copy between a pinned buffer and the device that the host does not wait for.
struct Copy {
  bool to_host;
  int stream;
  uint64_t time;
  Tensor buffer;  // the pinned one; without ownership where the copy goes to the device
  Tensor value;   // what arrives there; what was in it, where the copy goes to the device
  c10::weak_intrusive_ptr<c10::StorageImpl> alive;
  std::string at;
};
auto& copies = *new std::vector<Copy>;

void finish(const Copy& copy) {
  auto alive = copy.alive.lock();
  if (!alive.defined()) return;
  BelowAutograd below;
  if (copy.to_host)
    copy.buffer.copy_(copy.value);
  else if (memcmp(copy.buffer.data_ptr(), copy.value.data_ptr(), copy.value.nbytes()) != 0)
    hazard("pinned-reuse", "a pinned buffer was changed before its copy was known to be over; copied at " + copy.at);
}
template <class Due>
void finish_those(Due due) {
  std::vector<Copy> over, rest;
  {
    Locked locked;
    for (auto& copy : copies) (due(copy) ? over : rest).push_back(std::move(copy));
    copies.swap(rest);
  }
  for (auto& copy : over) finish(copy);
}
// Stream s is about to read or write this buffer: copies before it in the order of streams are over by then.
void finish_before(int s, const Tensor& buffer, bool writes) {
  const char *from = (const char*)buffer.data_ptr(), *to = from + buffer.nbytes();
  finish_those([&](const Copy& copy) {
    const char* at = (const char*)copy.buffer.data_ptr();
    bool overlaps = at < to && from < at + copy.buffer.nbytes();
    return overlaps && known[s][copy.stream] >= copy.time && (copy.to_host || writes);
  });
}

// ---- The host waits

void check_no_capture(const std::string& kind) {
  TORCH_CHECK(!capturing(), "CUDA error (simulated): operation not permitted when stream is capturing: ", kind);
}
void count_sync(const std::string& kind) {
  check_no_capture(kind);
  std::string at = kind + " @ " + where();
  Locked locked;
  counts.syncs++;
  syncs_at[at]++;
}
bool knows(const Clock& clock) {
  Locked locked;
  for (int i = 0; i < STREAMS; i++)
    if (host[i] < clock[i]) return false;
  return true;
}
void host_learns(const Clock& clock) {
  {
    Locked locked;
    learn(host, clock);
  }
  finish_those([](const Copy& copy) { return host[copy.stream] >= copy.time; });
}
// What the host knows to be over is not waited for.
void wait_until(const Clock& clock, const std::string& kind) {
  check_no_capture(kind);
  if (!knows(clock)) count_sync(kind);
  host_learns(clock);
}
void wait_for_stream(int s, const std::string& kind) { wait_until(known[s], kind); }
void wait_for_device(const std::string& kind) {
  Clock all(STREAMS, 0);
  {
    Locked locked;
    for (auto& clock : known) learn(all, clock);
  }
  wait_until(all, kind);
}

// ---- Aliases

// A CPU tensor over the same memory. It keeps the memory alive where `owns`.
Tensor alias_of(const Tensor& t, bool owns = true) {
  auto storage = t.storage();
  void* p = storage.mutable_data();
  auto release = [](void* held) { delete (c10::Storage*)held; };
  c10::DataPtr data = owns && p ? c10::DataPtr(p, new c10::Storage(storage), release, CPU)
                                : c10::DataPtr(p, nullptr, &c10::detail::deleteNothing, CPU);
  c10::Storage::use_byte_size_t by_bytes;
  c10::Storage cpu(by_bytes, storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  c10::DispatchKeySet key(c10::DispatchKey::CPU);
  auto made = at::detail::make_tensor<at::TensorImpl>(std::move(cpu), key, t.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  return made;
}
// A device tensor of this storage, laid out as `like`.
Tensor over(const c10::Storage& storage, const Tensor& like) {
  c10::DispatchKeySet key(c10::DispatchKey::CUDA);
  auto made = at::detail::make_tensor<at::TensorImpl>(c10::Storage(storage), key, like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}
Tensor to_device(const Tensor& cpu) {
  size_t n = cpu.storage().nbytes();
  c10::Storage::use_byte_size_t by_bytes;
  c10::Storage storage(by_bytes, n, device_allocator.allocate(n), &device_allocator, true);
  if (n) memcpy(storage.mutable_data(), cpu.storage().data(), n);
  return over(storage, cpu);
}
void move_to(const Tensor& t, const c10::Storage& storage, const Tensor& like) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
}

// ---- Graphs: a capture records and computes nothing; a replay runs what was recorded, on the recorded memory

void graph_sees(const Tensor& t, bool writes, const std::string& at) {
  if (!t.defined() || !t.is_cuda() || !t.storage().data()) return;
  const void* p = t.storage().data();
  if (blocks.at(p).graph == capture->id) {
    capture->pool.emplace(p, t.storage());
    return;
  }
  if (!capture->outside.count(p)) capture->outside.emplace(p, Outside{t.storage().getWeakStorageImpl(), at});
  capture->outside.at(p).written |= writes;
  if (writes && !capture->before.count(p)) {
    const char* bytes = (const char*)p;
    capture->before.emplace(p, std::vector<char>(bytes, bytes + t.storage().nbytes()));
  }
}
// An alias that a graph may hold: it keeps memory of the graph's pool alive, and not what lies outside.
Tensor recorded(const Tensor& t) {
  Locked locked;
  auto it = blocks.find(t.storage().data());
  return alias_of(t, it != blocks.end() && it->second.graph == capture->id);
}
void poison_pool(Graph* graph) {
  for (auto& [p, storage] : graph->pool) memset(const_cast<void*>(p), 0xFF, storage.nbytes());
}
bool is_there(const Outside& seen, const void* p) {
  auto storage = seen.alive.lock();
  return storage.defined() && storage->data() == p;
}
void begin_capture(Graph* graph) {
  Locked locked;
  TORCH_CHECK(!capture, "a capture is under way");
  static int64_t ids = 0;
  graph->id = ++ids;
  capture = graph;
  capture_stream = current;
  counts.captures++;
}
void end_capture(Graph* graph) {
  Locked locked;
  for (auto& [p, bytes] : graph->before)
    if (is_there(graph->outside.at(p), p)) memcpy(const_cast<void*>(p), bytes.data(), bytes.size());
  graph->before.clear();
  poison_pool(graph);
  capture = nullptr;
  capture_stream = -1;
}
void replay(Graph* graph) {
  {
    Locked locked;
    TORCH_CHECK(!capturing(), "CUDA error (simulated): a replay while a stream is capturing");
    uint64_t time = tick(current);
    for (auto& [p, seen] : graph->outside) {
      if (!is_there(seen, p)) {
        hazard("graph-freed", "a graph is replayed whose memory was freed; its capture saw it at " + seen.seen_at);
        TORCH_CHECK(false, "CUDA error (simulated): a graph touches memory that was freed, seen at ", seen.seen_at);
      }
      touch(p, seen.written, current, time);
    }
    for (auto& [p, storage] : graph->pool) touch(p, true, current, time);
    poison_pool(graph);
    counts.replays++;
    counts.launches++;
    counts.replayed += graph->nodes.size();
  }
  BelowAutograd below;
  for (auto& node : graph->nodes) node();
}

// ---- The fallback: every operation without a kernel of its own below

// Applies f(Tensor) -> Tensor to every tensor in v, and turns devices into the CPU.
template <class F>
void each_tensor(IValue& v, F f) {
  if (v.isTensor()) {
    if (v.toTensor().defined()) v = f(v.toTensor());
  } else if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (std::optional<Tensor> t : v.toOptionalTensorList())
      list.push_back(t && t->defined() ? std::optional<Tensor>(f(*t)) : t);
    v = list;
  } else if (v.isTensorList() || (v.isList() && v.toListRef().size() && v.toListRef()[0].isTensor())) {
    auto list = v.toTensorVector();
    for (auto& t : list) t = f(t);
    v = IValue(list);
  } else if (v.isDevice() && v.toDevice().is_cuda()) {
    v = CPU;
  } else if (v.isGenerator() && v.toGenerator().device().is_cuda()) {
    v = IValue();
  }
}
template <class F>
void see_tensors(IValue v, F f) {
  each_tensor(v, [&](const Tensor& t) {
    f(t);
    return t;
  });
}

// Operations that take no 0-dim tensor of the CPU beside those of the device.
const std::set<std::string> STRICT = {
    "addmm", "baddbmm", "bmm", "bucketize", "cat", "cumsum", "embedding", "embedding_dense_backward", "gather",
    "index_add", "index_copy", "index_select", "mm", "repeat_interleave", "scatter", "scatter_add", "scatter_reduce",
    "searchsorted", "sort", "take_along_dim", "topk"};
// Operations whose results' shapes, or the result itself, the host has to know.
const std::set<std::string> WAITING = {"_unique2", "bincount", "equal", "masked_select", "nonzero",
                                       "unique_consecutive", "unique_dim"};
const std::set<std::string> INDEXING = {"_index_put_impl", "_unsafe_index", "_unsafe_index_put", "index", "index_put"};

struct Operation {
  const c10::OperatorHandle& op;
  std::string name, plain;  // aten::add_, add
  size_t count;

  explicit Operation(const c10::OperatorHandle& op) : op(op), name(op.schema().operator_name().name) {
    plain = name.substr(name.rfind(':') + 1);
    if (plain.size() > 1 && plain.back() == '_') plain.pop_back();
    count = op.schema().arguments().size();
  }
  bool writes(size_t i) const {
    auto* alias = op.schema().arguments()[i].alias_info();
    return alias && alias->isWrite();
  }
};

// Refuses tensors of the CPU beside those of the device. Returns what the host waits for in this operation, or "".
std::string check_devices(const Operation& call, const IValue* arguments) {
  bool indexing = INDEXING.count(call.plain), mask = false, host_index = false;
  for (size_t i = 0; i < call.count; i++) {
    if (arguments[i].isDevice()) continue;
    bool is_index = indexing && i == 1;
    see_tensors(arguments[i], [&](const Tensor& t) {
      if (is_index && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte)) mask = true;
      if (t.is_cuda() || t.is_meta()) return;
      if (is_index) host_index = true;
      bool scalar = arguments[i].isTensor() && t.dim() == 0 && !call.writes(i) && !STRICT.count(call.plain);
      TORCH_CHECK(is_index || scalar,
                  "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and ",
                  t.device(), "! (simulated: ", call.name, ", argument ", call.op.schema().arguments()[i].name(),
                  " of shape ", t.sizes(), ")");
    });
  }
  // Where one number is put at the places of a mask, torch fills them and does not look for them.
  bool fills = mask && call.count > 2 && arguments[2].isTensor() && arguments[2].toTensor().is_cpu();
  if (host_index) return "index on the host, " + call.name;
  if (mask && !fills) return "mask, " + call.name;
  bool repeats = call.plain == "repeat_interleave" && call.count > 1 && arguments[call.count - 1].isNone();
  return WAITING.count(call.plain) || repeats ? call.name : "";
}

using Pairs = std::vector<std::pair<Tensor, Tensor>>;  // tensors of the device with their aliases

// A node that calls `op` again on aliases that it may hold, and copies its new results to where they were.
std::function<void()> node_of(const c10::OperatorHandle& op, torch::jit::Stack arguments, const Pairs& pairs,
                              const std::vector<Tensor>& fresh) {
  for (auto& v : arguments)
    each_tensor(v, [&](const Tensor& t) {
      for (auto& [original, alias] : pairs)
        if (alias.is_same(t)) return recorded(original);
      return t.dim() ? t : t.clone();  // a graph keeps the number
    });
  std::vector<Tensor> into;
  for (auto& t : fresh) into.push_back(recorded(t));
  return [op, arguments, into] {
    torch::jit::Stack stack = arguments;
    op.callBoxed(stack);
    size_t next = 0;
    for (auto& v : stack)
      see_tensors(v, [&](const Tensor& t) {
        bool given = false;
        for (auto& argument : arguments) see_tensors(argument, [&](const Tensor& x) { given |= x.is_same(t); });
        if (!given && next < into.size()) into[next++].copy_(t);
      });
  };
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Operation call(op);
  size_t base = stack->size() - call.count;
  std::string wait = check_devices(call, stack->data() + base);
  if (!wait.empty()) check_no_capture(wait);

  bool recording = capturing(), writes = false;
  std::string at = recording ? where() : "";
  Pairs pairs;
  torch::jit::Stack inner;
  uint64_t time;
  {
    Locked locked;
    time = tick(current);
    for (size_t i = 0; i < call.count; i++) {
      IValue v = (*stack)[base + i];
      bool written = call.writes(i);
      writes |= written;
      see_tensors(v, [&](const Tensor& t) {
        if (!t.is_cuda()) return;
        if (recording) graph_sees(t, written, at);
        touch(t.storage().data(), written, current, time);
      });
      each_tensor(v, [&](const Tensor& t) {
        if (!t.is_cuda()) return t;
        for (auto& [original, alias] : pairs)
          if (original.is_same(t)) return alias;
        pairs.emplace_back(t, alias_of(t));
        return pairs.back().second;
      });
      inner.push_back(std::move(v));
    }
  }
  if (!wait.empty()) wait_for_stream(current, wait);
  torch::jit::Stack again = recording ? inner : torch::jit::Stack();
  {
    BelowAutograd below;
    op.callBoxed(inner);
  }

  for (auto& [original, alias] : pairs) {  // an argument that was resized
    bool same = alias.storage().data() == original.storage().data();
    if (same && alias.sizes() == original.sizes()) continue;
    move_to(original, same ? original.storage() : to_device(alias).storage(), alias);
  }
  // A result is an argument, a view of one, or new memory.
  torch::jit::drop(*stack, call.count);
  std::vector<Tensor> fresh;
  for (auto& result : inner) {
    each_tensor(result, [&](const Tensor& t) -> Tensor {
      for (auto& [original, alias] : pairs)
        if (alias.is_same(t)) return original;
      if (!t.device().is_cpu()) return t;
      for (auto& [original, alias] : pairs)
        if (t.storage().data() && alias.storage().data() == t.storage().data()) return over(original.storage(), t);
      fresh.push_back(to_device(t));
      Locked locked;
      touch(fresh.back().storage().data(), true, current, time);
      if (recording) graph_sees(fresh.back(), true, at);
      return fresh.back();
    });
    stack->push_back(std::move(result));
  }
  bool tensors = stack->size() > base && (stack->back().isTensor() || stack->back().isTensorList());
  bool view = tensors && !writes && fresh.empty();
  if (recording && !view) capture->nodes.push_back(node_of(op, std::move(again), pairs, fresh));
  Locked locked;
  if (view) {
    counts.views++;
  } else if (!recording) {
    counts.launches++;
    operations[call.name]++;
  }
}

// ---- Operations with a kernel of their own

using Sizes = c10::SymIntArrayRef;
using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Device = std::optional<at::Device>;
using Flag = std::optional<bool>;
const c10::DispatchKeySet KEY(c10::DispatchKey::CUDA);

Tensor empty(Sizes size, Dtype dtype, Layout, Device, Flag, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic_symint(size, &device_allocator, KEY, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(Sizes size, Sizes stride, Dtype dtype, Layout, Device, Flag) {
  return at::detail::empty_strided_symint_generic(size, stride, &device_allocator, KEY, c10::dtype_or_default(dtype));
}
void count_view() {
  Locked locked;
  counts.views++;
}
Tensor as_strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  count_view();
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
Tensor reshape_alias(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  count_view();
  return at::native::_reshape_alias(self, size, stride);
}
Tensor view(const Tensor& self, at::IntArrayRef size) {
  count_view();
  return at::native::view(self, size);
}

void count_launch(const std::string& name) {
  if (capturing()) return;
  counts.launches++;
  operations[name]++;
}

void add_copy(Copy copy) {  // made before the lock is taken: to share a tensor of Python's may take Python's lock
  Locked locked;
  copy.time = known[copy.stream][copy.stream];
  copies.push_back(std::move(copy));
}

void copy_on_device(const Tensor& to, const Tensor& from) {
  alias_of(to).copy_(alias_of(from));
  if (capturing()) capture->nodes.push_back([to = recorded(to), from = recorded(from)] { to.copy_(from); });
}

void copy_to_device(const Tensor& to, const Tensor& from, bool non_blocking) {
  // What has to be cast or laid out anew goes through pageable memory.
  bool alike = from.strides() == to.strides() || (from.is_contiguous() && to.is_contiguous());
  alike = alike && from.sizes() == to.sizes() && from.scalar_type() == to.scalar_type();
  bool is_fixed = is_pinned(from.storage().data()) && from.is_non_overlapping_and_dense() && alike;
  TORCH_CHECK(!from.is_meta(), "a copy of a meta tensor");
  TORCH_CHECK(!capturing() || (is_fixed && non_blocking),
              "CUDA error (simulated): a copy of pageable memory while a stream is capturing");
  if (is_fixed) finish_before(current, from, false);
  alias_of(to).copy_(from);
  if (capturing()) {
    capture->nodes.push_back([to = recorded(to), from] { to.copy_(from); });
  } else if (!non_blocking) {
    wait_for_stream(current, "copy to the device");
  } else if (is_fixed) {
    // Its bytes in one run, whatever the order of its dimensions. Without ownership: a freed buffer cannot be changed.
    c10::Storage::use_byte_size_t by_bytes;
    c10::DataPtr data(const_cast<void*>(from.const_data_ptr()), CPU);
    c10::Storage storage(by_bytes, from.nbytes(), std::move(data), nullptr, false);
    c10::DispatchKeySet key(c10::DispatchKey::CPU);
    Tensor buffer = at::detail::make_tensor<at::TensorImpl>(std::move(storage), key, caffe2::TypeMeta::Make<uint8_t>());
    buffer.unsafeGetTensorImpl()->set_sizes_contiguous(at::IntArrayRef{(int64_t)from.nbytes()});
    std::string at = where();
    add_copy({false, current, 0, buffer, buffer.clone(), from.storage().getWeakStorageImpl(), at});
  }
}

void copy_to_host(const Tensor& to, const Tensor& from, bool non_blocking) {
  bool is_fixed = non_blocking && is_pinned(to.storage().data());
  TORCH_CHECK(!capturing() || is_fixed,
              "CUDA error (simulated): a copy to pageable memory while a stream is capturing");
  if (capturing()) {
    capture->nodes.push_back([to, from = recorded(from)] { to.copy_(from); });
  } else if (is_fixed) {
    Tensor value = alias_of(from).to(to.scalar_type()).clone();
    finish_before(current, to, true);
    if (to.is_non_overlapping_and_dense()) memset(to.data_ptr(), 0x7A, to.nbytes());  // it has not arrived yet
    add_copy({true, current, 0, to, value, to.storage().getWeakStorageImpl(), ""});
  } else {
    wait_for_stream(current, non_blocking ? "copy to pageable memory, non_blocking" : "copy to the host");
    to.copy_(alias_of(from));
  }
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.is_same(from) || to.numel() == 0) return to;
  BelowAutograd below;
  std::string at = capturing() ? where() : "";
  {
    Locked locked;
    uint64_t time = tick(current);
    count_launch(!from.is_cuda() ? "copy to the device" : to.is_cuda() ? "copy" : "copy to the host");
    for (const Tensor* t : {&from, static_cast<const Tensor*>(&to)}) {
      if (!t->is_cuda()) continue;
      touch(t->storage().data(), t == &to, current, time);
      if (capturing()) graph_sees(*t, t == &to, at);
    }
  }
  if (!from.is_cuda())
    copy_to_device(to, from, non_blocking);
  else if (!to.is_cuda())
    copy_to_host(to, from, non_blocking);
  else
    copy_on_device(to, from);
  return to;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  {
    Locked locked;
    touch(self.storage().data(), false, current, tick(current));
    count_launch("aten::_local_scalar_dense");
  }
  wait_for_stream(current, "item");
  BelowAutograd below;
  return at::_local_scalar_dense(alias_of(self));
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  auto storage = impl->storage();
  size_t bytes = (self.storage_offset() + c10::multiply_integers(size)) * self.element_size();
  if (storage.nbytes() < bytes) {
    auto data = device_allocator.allocate(bytes);
    if (storage.nbytes()) memcpy(data.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(size);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(source.device().is_cuda(),
              "Attempted to set the storage of a tensor on cuda:0 to a storage on a different device (simulated)");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  if (stride.size() == size.size() && (size.empty() || !stride.empty())) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  }
  return self;
}
Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  int64_t count = source.nbytes() / self.element_size();
  return set_storage(self, source, 0, {count}, {1});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_nothing(Tensor& self) {
  c10::Storage::use_byte_size_t by_bytes;
  c10::Storage storage(by_bytes, 0, device_allocator.allocate(0), &device_allocator, true);
  return set_storage(self, storage, 0, {0}, {1});
}

void record_stream_of(const void* p, int s) {
  Locked locked;
  auto it = blocks.find(p);
  if (it != blocks.end()) it->second.recorded.insert(s);
}
void record_stream(Tensor& self, c10::Stream s) { record_stream_of(self.storage().data(), s.id()); }

int64_t math_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                       std::optional<double>, bool) {
  return (int64_t)at::SDPBackend::math;
}

// ---- The device guard and the hooks: what torch's C++ asks of a device

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return GPU; }
  c10::Device getDevice() const override { return GPU; }
  void setDevice(c10::Device d) const override {
    TORCH_CHECK(d.index() <= 0, "CUDA error: invalid device ordinal (simulated)");
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  static c10::Stream stream(int id) { return c10::Stream(c10::Stream::UNSAFE, GPU, id); }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(make_stream()); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(make_stream()); }
  c10::Stream exchangeStream(c10::Stream s) const override { return stream(std::exchange(current, (int)s.id())); }
  bool queryStream(const c10::Stream&) const override { return true; }
  // No `override`: torch 2.11 does not declare it.
  bool isStreamCapturing(const c10::Stream& s) const { return capture && s.id() == capture_stream; }
  void synchronizeStream(const c10::Stream& s) const override { wait_for_stream(s.id(), "Stream.synchronize"); }
  void synchronizeDevice(c10::DeviceIndex) const override { wait_for_device("synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override {
    record_stream_of(p.get(), s.id());
  }

  void record(void** event, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override {
    Locked locked;
    if (!*event) *event = new Clock;
    *(Clock*)*event = known[s.id()];
  }
  void block(void* event, const c10::Stream& s) const override {
    Locked locked;
    if (event) learn(known[s.id()], *(Clock*)event);
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    wait_until(event ? *(Clock*)event : host, "Event.synchronize");
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete (Clock*)event; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  int getNumGPUs() const override { return 1; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  at::Device getDeviceFromPtr(void*) const override { return GPU; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void deviceSynchronize(c10::DeviceIndex) const override { wait_for_device("synchronize"); }
};

struct Event {
  bool timing;
  bool recorded = false;
  bool asked = false;
  Clock at{};
  double seconds = 0;

  bool is_over() const { return !recorded || knows(at); }
  void record(int s) {
    Locked locked;
    tick(s);
    *this = {timing, true, false, known[s], now()};
  }
  void wait(int s) const {
    Locked locked;
    if (recorded) learn(known[s], at);
  }
  void synchronize() const { wait_until(recorded ? at : host, "Event.synchronize"); }
  // The first answer is False, so that code which assumes that the work is over fails.
  bool query() {
    TORCH_CHECK(!capturing(), "CUDA error (simulated): an event is asked while a stream is capturing");
    if (is_over()) return true;
    if (!std::exchange(asked, true)) return false;
    host_learns(at);
    return true;
  }
  double elapsed_ms(const Event& end) const {
    TORCH_CHECK(timing && end.timing, "Both events must be created with argument 'enable_timing=True'.");
    TORCH_CHECK(recorded && end.recorded, "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(is_over() && end.is_over(), "CUDA error: device not ready (simulated: nobody waited for the event)");
    return (end.seconds - seconds) * 1000;
  }
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
};

// A kernel that is no operation of torch is launched on these tensors. It counts as a write to all of them.
void launch(const std::vector<Tensor>& tensors) {
  std::string at = capturing() ? where() : "";
  Locked locked;
  uint64_t time = tick(current);
  if (!capturing()) counts.launches++, counts.kernels++;
  for (auto& t : tensors) {
    TORCH_CHECK(t.is_cuda() || is_pinned(t.storage().data()),
                "Pointer argument cannot be accessed from Triton (cpu tensor?) (simulated)");
    if (!t.is_cuda() || !t.storage().data()) continue;
    touch(t.storage().data(), true, current, time);
    if (capturing()) graph_sees(t, true, at);
  }
}
void record_call(py::function call) {
  auto* held = new py::function(std::move(call));  // graphs may outlive the interpreter
  capture->nodes.push_back([held] {
    py::gil_scoped_acquire gil;
    (*held)();
  });
}
template <class T>
T locked_copy(const T& value) {
  Locked locked;
  return value;
}
void reset() {
  Locked locked;
  counts = {};
  operations.clear();
  syncs_at.clear();
  hazards.clear();
}
py::dict counted() {
  using namespace py::literals;
  Counts counts;
  {
    Locked locked;
    counts = sim::counts;
  }
  return py::dict("launches"_a = counts.launches, "kernels"_a = counts.kernels, "views"_a = counts.views,
                  "allocations"_a = counts.allocations, "syncs"_a = counts.syncs, "captures"_a = counts.captures,
                  "replays"_a = counts.replays, "replayed_nodes"_a = counts.replayed);
}
}  // namespace sim

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", sim::empty);
  m.impl("empty_strided", sim::empty_strided);
  m.impl("as_strided", sim::as_strided);
  m.impl("_reshape_alias", sim::reshape_alias);
  m.impl("view", sim::view);
  m.impl("copy_", sim::copy_);
  m.impl("_local_scalar_dense", sim::local_scalar_dense);
  m.impl("resize_", sim::resize_);
  m.impl("set_.source_Storage", sim::set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", sim::set_storage);
  m.impl("set_.source_Tensor", sim::set_tensor);
  m.impl("set_", sim::set_nothing);
  m.impl("record_stream", sim::record_stream);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  // torch asked for its hooks while it was imported, and keeps what it got: an object without members, which now gets
  // the virtual functions of ours.
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  static Hooks hooks;
  auto* kept = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(kept) = *reinterpret_cast<void**>(&hooks);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&math_attention);

  py::class_<Event>(m, "Event")
      .def(py::init([](bool timing) { return Event{timing}; }))
      .def("record", &Event::record)
      .def("wait", &Event::wait)
      .def("synchronize", &Event::synchronize)
      .def("query", &Event::query)
      .def("elapsed_time", &Event::elapsed_ms);
  py::class_<Graph>(m, "Graph")
      .def(py::init<>())
      .def("begin", [](Graph& graph) { begin_capture(&graph); })
      .def("end", [](Graph& graph) { end_capture(&graph); })
      .def("replay", [](Graph& graph) { replay(&graph); })
      .def_property_readonly("nodes", [](Graph& graph) { return graph.nodes.size(); });
  m.def("where_with", [](py::object function) { where_function = new py::object(function); });
  m.def("current_stream", [] { return current; });
  m.def("set_stream", [](int s) { return std::exchange(current, s); });
  m.def("wait_stream", [](int s, int other) {
    Locked locked;
    learn(known[s], known[other]);
  });
  m.def("synchronize_stream", [](int s) { wait_for_stream(s, "Stream.synchronize"); });
  m.def("synchronize", [] { wait_for_device("synchronize"); });
  m.def("capturing", &capturing);
  m.def("alias", [](const Tensor& t) { return capturing() ? recorded(t) : alias_of(t); });
  m.def("launch", &launch);
  m.def("record_call", &record_call);
  m.def("reset", &reset);
  m.def("counts", &counted);
  m.def("operations", [] { return locked_copy(operations); });
  m.def("syncs", [] { return locked_copy(syncs_at); });
  m.def("hazards", [] { return locked_copy(hazards); });
  m.def("memory", [] { return std::make_tuple(allocated, peak, total_memory); });
  m.def("reset_peak", [] { peak = allocated; });
  m.def("set_total_memory", [](int64_t n) { total_memory = n; });
}
