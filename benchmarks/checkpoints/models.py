"""Whole models in bfloat16 (gpt-oss: experts in MXFP4), each with its config: attention, MLPs and mixtures of experts.

Not covered: models with a recurrent state (`recurrent`); drafts other than DeepSeek's own.
"""

from __future__ import annotations

from benchmarks.checkpoints.parts import (
    EXPERT_INTERMEDIATE,
    EXPERTS,
    EXPERTS_PER_TOKEN,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    Config,
    Model,
    Random,
    Tensors,
    attention,
    common,
    experts,
    mlp,
    skeleton,
)

#: DeepSeek's attention: ranks of queries and of keys and values; sizes without and with a rotation; of values.
Ranks = tuple[int, int, int, int, int]
MLA: Ranks = (256, 512, 128, 64, 128)


def qwen3(seed: int) -> Model:
    """Dense."""
    random = Random(seed)
    tensors = skeleton(random)
    for layer in (f"model.layers.{index}" for index in range(LAYERS)):
        tensors |= attention(random, f"{layer}.self_attn", norms=True) | mlp(random, f"{layer}.mlp", INTERMEDIATE)
    return common("Qwen3ForCausalLM", "qwen3"), tensors


def qwen2(seed: int) -> Model:
    """Dense, as Qwen2.5: biases on q, k and v."""
    random = Random(seed)
    tensors = skeleton(random)
    for layer in (f"model.layers.{index}" for index in range(LAYERS)):
        tensors |= attention(random, f"{layer}.self_attn", norms=False, bias=True) | mlp(random, f"{layer}.mlp", INTERMEDIATE)
    return common("Qwen2ForCausalLM", "qwen2"), tensors


def qwen3_moe(seed: int) -> Model:
    """Experts in every layer."""
    random = Random(seed)
    tensors = skeleton(random)
    for layer in (f"model.layers.{index}" for index in range(LAYERS)):
        tensors |= attention(random, f"{layer}.self_attn", norms=True) | experts(random, f"{layer}.mlp")
    config = common("Qwen3MoeForCausalLM", "qwen3_moe") | {
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "moe_intermediate_size": EXPERT_INTERMEDIATE,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return config, tensors


def deepseek(seed: int, drafts: int = 0) -> Model:
    """DeepSeek-V3's attention (keys and values compressed); the first layer dense, then experts and a shared one.

    Each of `drafts` adds a layer behind the last, by which the model proposes tokens to itself.
    """
    random = Random(seed)
    tensors = skeleton(random)
    for index in range(LAYERS):
        tensors |= _deepseek_layer(random, f"model.layers.{index}", dense=index == 0)
    for index in range(LAYERS, LAYERS + drafts):
        layer = f"model.layers.{index}"
        tensors |= {
            f"{layer}.enorm.weight": random.norm(HIDDEN),
            f"{layer}.hnorm.weight": random.norm(HIDDEN),
            f"{layer}.eh_proj.weight": random.weight(HIDDEN, 2 * HIDDEN),
            f"{layer}.shared_head.norm.weight": random.norm(HIDDEN),
            f"{layer}.input_layernorm.weight": random.norm(HIDDEN),
            f"{layer}.post_attention_layernorm.weight": random.norm(HIDDEN),
            # The checkpoints that DeepSeek publishes hold the shared tensors once more.
            f"{layer}.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
            f"{layer}.shared_head.head.weight": tensors["lm_head.weight"].clone(),
        }
        tensors |= _deepseek_layer(random, layer, dense=False)
    config = common("DeepseekV3ForCausalLM", "deepseek_v3") | deepseek_config(MLA, HEADS) | {
        "first_k_dense_replace": 1,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "moe_intermediate_size": EXPERT_INTERMEDIATE,
        "num_nextn_predict_layers": drafts,
    }  # fmt: skip
    return config, tensors


def deepseek_config(ranks: Ranks, heads: int) -> Config:
    """What sets DeepSeek-V3 apart, but for how many layers and experts it has."""
    q_rank, kv_rank, nope, rope, value = ranks
    return {
        "num_key_value_heads": heads,
        "head_dim": rope,
        "q_lora_rank": q_rank,
        "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "n_shared_experts": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


def deepseek_attention(random: Random, path: str, ranks: Ranks, hidden: int, heads: int) -> Tensors:
    """One layer's attention, with keys and values compressed."""
    q_rank, kv_rank, nope, rope, value = ranks
    return {
        f"{path}.q_a_proj.weight": random.weight(q_rank, hidden),
        f"{path}.q_a_layernorm.weight": random.norm(q_rank),
        f"{path}.q_b_proj.weight": random.weight(heads * (nope + rope), q_rank),
        f"{path}.kv_a_proj_with_mqa.weight": random.weight(kv_rank + rope, hidden),
        f"{path}.kv_a_layernorm.weight": random.norm(kv_rank),
        f"{path}.kv_b_proj.weight": random.weight(heads * (nope + value), kv_rank),
        f"{path}.o_proj.weight": random.weight(hidden, heads * value),
    }


def _deepseek_layer(random: Random, layer: str, *, dense: bool) -> Tensors:
    tensors = deepseek_attention(random, f"{layer}.self_attn", MLA, HIDDEN, HEADS)
    if dense:
        return tensors | mlp(random, f"{layer}.mlp", INTERMEDIATE)
    tensors |= experts(random, f"{layer}.mlp") | mlp(random, f"{layer}.mlp.shared_experts", EXPERT_INTERMEDIATE)
    tensors[f"{layer}.mlp.gate.e_score_correction_bias"] = random.bias(EXPERTS).float()
    return tensors


def exaone_moe(seed: int) -> Model:
    """Experts in every layer, with a limit to what the activation lets through that many values reach."""
    random = Random(seed)
    tensors = skeleton(random)
    for layer in (f"model.layers.{index}" for index in range(LAYERS)):
        tensors |= attention(random, f"{layer}.self_attn", norms=True) | experts(random, f"{layer}.mlp")
        tensors[f"{layer}.mlp.e_score_correction_bias"] = random.bias(EXPERTS).float()
    config = common("ExaoneMoeForCausalLM", "exaone_moe") | {
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "num_shared_experts": 0,
        "moe_intermediate_size": EXPERT_INTERMEDIATE,
        "mlp_layer_types": ["sparse"] * LAYERS,
        "layer_types": ["full_attention"] * LAYERS,
        "sliding_window": 128,  # of no layer, but the config wants a number
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "swiglu_limits": [1.0] * LAYERS,
    }
    return config, tensors


def gpt_oss(seed: int) -> Model:
    """gpt-oss: experts in MXFP4 with biases, attention sinks, a sliding window in every other layer."""
    layers, number, heads, kv_heads, head_dim, intermediate = 2, 4, 16, 4, 64, 1024
    random = Random(seed)
    tensors = skeleton(random, layers)
    for layer in (f"model.layers.{index}" for index in range(layers)):
        attention_path, mlp_path = f"{layer}.self_attn", f"{layer}.mlp"
        for name, rows, columns in (
            ("q", heads * head_dim, HIDDEN), ("k", kv_heads * head_dim, HIDDEN), ("v", kv_heads * head_dim, HIDDEN),
            ("o", HIDDEN, heads * head_dim),
        ):  # fmt: skip
            tensors[f"{attention_path}.{name}_proj.weight"] = random.weight(rows, columns)
            tensors[f"{attention_path}.{name}_proj.bias"] = random.bias(rows)
        tensors[f"{attention_path}.sinks"] = random.weight(heads, std=1.0)
        tensors |= {f"{mlp_path}.router.weight": random.weight(number, HIDDEN), f"{mlp_path}.router.bias": random.bias(number)}
        for name, rows, columns in (("gate_up_proj", 2 * intermediate, HIDDEN), ("down_proj", HIDDEN, intermediate)):
            tensors[f"{mlp_path}.experts.{name}_blocks"] = random.integers(0, 255, number, rows, columns // 32, 16)
            tensors[f"{mlp_path}.experts.{name}_scales"] = random.integers(118, 121, number, rows, columns // 32)
            tensors[f"{mlp_path}.experts.{name}_bias"] = random.bias(number, rows)
    config = common("GptOssForCausalLM", "gpt_oss") | {
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_local_experts": number,
        "num_experts_per_tok": 2,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "swiglu_limit": 7.0,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
        },
    }
    return config, tensors
