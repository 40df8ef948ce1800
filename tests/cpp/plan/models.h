// Real models on real meshes, as the planner sees them.
#pragma once

#include <cstdint>
#include <string>

#include "plan/ranks.h"

namespace vescale_ckpt::plan {

struct Llama {
  int64_t dim, layers, hidden, key_value, vocabulary = 128256;
};

constexpr Llama kLlama1B = {2048, 16, 8192, 512}, kLlama8B = {4096, 32, 14336, 1024},
                kLlama70B = {8192, 80, 28672, 1024};

// Calls body(name, shape, dim that tensor parallelism cuts or -1) for each parameter.
template <typename Body>
void for_each_parameter(const Llama& model, const Body& body) {
  body("tok_embeddings.weight", Dims{model.vocabulary, model.dim}, -1);
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    const std::string prefix = "layers." + std::to_string(layer) + ".";
    body(prefix + "attention.wq.weight", Dims{model.dim, model.dim}, 0);
    body(prefix + "attention.wk.weight", Dims{model.key_value, model.dim}, 0);
    body(prefix + "attention.wv.weight", Dims{model.key_value, model.dim}, 0);
    body(prefix + "attention.wo.weight", Dims{model.dim, model.dim}, 1);
    body(prefix + "feed_forward.w1.weight", Dims{model.hidden, model.dim}, 0);
    body(prefix + "feed_forward.w2.weight", Dims{model.dim, model.hidden}, 1);
    body(prefix + "feed_forward.w3.weight", Dims{model.hidden, model.dim}, 0);
    body(prefix + "attention_norm.weight", Dims{model.dim}, -1);
    body(prefix + "ffn_norm.weight", Dims{model.dim}, -1);
  }
  body("norm.weight", Dims{model.dim}, -1);
  body("output.weight", Dims{model.vocabulary, model.dim}, -1);
}

// The same with Adam's state behind each: two moments in float32.
template <typename Body>
void for_each_tensor(const Llama& model, bool adam, const Body& body) {
  for_each_parameter(model, [&](const std::string& name, const Dims& shape, int dim) {
    body(name, shape, dim, "bfloat16");
    if (!adam) return;
    body("optimizer.state." + name + ".exp_avg", shape, dim, "float32");
    body("optimizer.state." + name + ".exp_avg_sq", shape, dim, "float32");
  });
}

// The `index`-th of `parts` along `dim`, as torch.chunk cuts.
inline void cut(Dims& offset, Dims& size, size_t dim, int64_t parts, int64_t index) {
  const int64_t length = size[dim], step = (length + parts - 1) / parts;
  offset[dim] = std::min(length, step * index);
  size[dim] = std::min(step, length - offset[dim]);
}

inline Ranks replicated_llama(const Llama& model, bool adam, size_t count) {
  Ranks ranks(count);
  for_each_tensor(model, adam, [&](const std::string& name, const Dims& shape, int, const char* dtype) {
    ranks.replicated(name, shape, dtype);
  });
  return ranks;
}

// Sharded over `shards` ranks by rows, `replicas` times.
inline Ranks hsdp_llama(const Llama& model, bool adam, size_t replicas, size_t shards) {
  Ranks ranks(replicas * shards);
  for_each_tensor(model, adam, [&](const std::string& name, const Dims& shape, int, const char* dtype) {
    for (size_t rank = 0; rank < ranks.count(); ++rank) {
      Dims offset(shape.size()), size = shape;
      cut(offset, size, 0, static_cast<int64_t>(shards), static_cast<int64_t>(rank % shards));
      ranks.shard(rank, name, shape, offset, size, dtype);
    }
  });
  return ranks;
}

// Tensor parallel over neighbours, data parallel by replicas; embedding tables and norms on all.
inline Ranks tensor_parallel_llama(const Llama& model, bool adam, size_t tensor_parallel, size_t replicas) {
  Ranks ranks(tensor_parallel * replicas);
  for_each_tensor(model, adam, [&](const std::string& name, const Dims& shape, int dim, const char* dtype) {
    for (size_t rank = 0; rank < ranks.count(); ++rank) {
      Dims offset(shape.size()), size = shape;
      if (dim >= 0) {
        cut(offset, size, static_cast<size_t>(dim), static_cast<int64_t>(tensor_parallel),
            static_cast<int64_t>(rank % tensor_parallel));
      }
      ranks.shard(rank, name, shape, offset, size, dtype);
    }
  });
  return ranks;
}

// Experts belong to one of `groups`; each group's ranks hold copies of them, all ranks hold the rest.
inline Ranks mixture_of_experts(size_t groups, size_t replicas) {
  const Llama model = {4096, 32, 14336, 1024, 32000};
  constexpr size_t kExperts = 8;
  Ranks ranks(groups * replicas);
  for_each_parameter(model, [&](const std::string& name, const Dims& shape, int) {
    if (name.find("feed_forward") == std::string::npos) return ranks.replicated(name, shape, "bfloat16");
    for (size_t expert = 0; expert < kExperts; ++expert) {
      for (size_t rank = expert % groups; rank < ranks.count(); rank += groups) {
        ranks.tensor(rank, name + ".experts." + std::to_string(expert), shape, "bfloat16");
      }
    }
  });
  return ranks;
}

// The same model with all experts of a layer in one tensor, cut along its first dimension between the groups.
inline Ranks stacked_experts(size_t groups, size_t replicas, int64_t layers) {
  const Llama model = {4096, layers, 14336, 1024, 32000};
  constexpr int64_t kExperts = 8;
  Ranks ranks(groups * replicas);
  for_each_parameter(model, [&](const std::string& name, const Dims& shape, int) {
    if (name.find("feed_forward") == std::string::npos) return ranks.replicated(name, shape, "bfloat16");
    const Dims stacked = {kExperts, shape[0], shape[1]};
    for (size_t rank = 0; rank < ranks.count(); ++rank) {
      Dims offset(3), size = stacked;
      cut(offset, size, 0, static_cast<int64_t>(groups), static_cast<int64_t>(rank % groups));
      ranks.shard(rank, name, stacked, offset, size, "bfloat16");
    }
  });
  return ranks;
}

}  // namespace vescale_ckpt::plan
