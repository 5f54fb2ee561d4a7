"""Models that mix attention with layers that keep a state: Mamba2 and gated delta net, in bfloat16.

Not covered: other recurrent layers; quantised projections in them.
"""

from __future__ import annotations

from benchmarks.checkpoints.parts import (
    EXPERT_INTERMEDIATE,
    EXPERTS,
    EXPERTS_PER_TOKEN,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    VOCAB,
    Model,
    Random,
    Tensors,
    attention,
    common,
    experts,
    mlp,
    skeleton,
)

CONVOLUTION = 4
#: Experts beside a gate that must never be chosen itself; see `qwen3_next`.
MANY_EXPERTS = 32


def nemotron_h(seed: int) -> Model:
    """Mamba2, an MLP, attention, and Mamba2 again."""
    heads, head_dim, groups, state = 16, 64, 2, 128
    inner, mixed = heads * head_dim, heads * head_dim + 2 * groups * state
    random = Random(seed)
    tensors = {
        "backbone.embeddings.weight": random.weight(VOCAB, HIDDEN),
        "backbone.norm_f.weight": random.norm(HIDDEN),
        "lm_head.weight": random.weight(VOCAB, HIDDEN),
    }
    pattern = "M-*M"
    for index, kind in enumerate(pattern):
        layer = f"backbone.layers.{index}.mixer"
        tensors[f"backbone.layers.{index}.norm.weight"] = random.norm(HIDDEN)
        if kind == "M":
            tensors |= {
                f"{layer}.in_proj.weight": random.weight(inner + mixed + heads, HIDDEN),
                f"{layer}.conv1d.weight": random.weight(mixed, 1, CONVOLUTION, std=0.3),
                f"{layer}.conv1d.bias": random.bias(mixed),
                f"{layer}.A_log": random.norm(heads).float(),
                f"{layer}.D": random.norm(heads).float(),
                f"{layer}.dt_bias": random.weight(heads, std=1.0).float(),
                f"{layer}.norm.weight": random.norm(inner),
                f"{layer}.out_proj.weight": random.weight(HIDDEN, inner),
            }
        elif kind == "-":
            tensors |= {
                f"{layer}.up_proj.weight": random.weight(INTERMEDIATE, HIDDEN),
                f"{layer}.down_proj.weight": random.weight(HIDDEN, INTERMEDIATE),
            }
        else:
            tensors |= attention(random, layer, norms=False)
    config = common("NemotronHForCausalLM", "nemotron_h") | {
        "num_hidden_layers": len(pattern),
        "hybrid_override_pattern": pattern,
        "mlp_hidden_act": "relu2",
        "mlp_bias": False,
        "use_bias": False,
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "n_groups": groups,
        "ssm_state_size": state,
        "conv_kernel": CONVOLUTION,
        "use_conv_bias": True,
        "chunk_size": 128,
        "layer_norm_epsilon": 1e-5,
        "num_logits_to_keep": 1,
    }
    return config, tensors


def qwen3_next(seed: int, *, lone_gate: bool = False) -> Model:
    """A gated delta net, then attention with a gate; both with experts.

    Args:
        lone_gate: no shared expert, but its gate, which vLLM then joins to the
            router's weights. Its score is near 0, far below the two best of many
            experts: there is no expert behind it that could be chosen.
    """
    keys, values, key_dim, value_dim = 4, 8, 128, 128
    number = MANY_EXPERTS if lone_gate else EXPERTS
    random = Random(seed)
    tensors = skeleton(random, 2)
    for index in range(2):
        layer = f"model.layers.{index}"
        if index == 0:
            tensors |= _delta_net(random, f"{layer}.linear_attn", keys * key_dim, values * value_dim, values)
        else:
            tensors |= attention(random, f"{layer}.self_attn", norms=True, gated=True)
        tensors |= experts(random, f"{layer}.mlp", number)
        tensors[f"{layer}.mlp.shared_expert_gate.weight"] = random.weight(1, HIDDEN, std=0.0005 if lone_gate else 0.05)
        if not lone_gate:
            tensors |= mlp(random, f"{layer}.mlp.shared_expert", EXPERT_INTERMEDIATE)
    for name in [name for name in tensors if name.endswith("norm.weight") and "linear_attn" not in name]:
        tensors[name] -= 1  # this model adds 1 to them
    config = common("Qwen3NextForCausalLM", "qwen3_next") | {
        "num_hidden_layers": 2,
        "num_key_value_heads": KV_HEADS,
        "layer_types": ["linear_attention", "full_attention"],
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": values,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": value_dim,
        "linear_conv_kernel_dim": CONVOLUTION,
        "num_experts": number,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "moe_intermediate_size": EXPERT_INTERMEDIATE,
        "shared_expert_intermediate_size": 0 if lone_gate else EXPERT_INTERMEDIATE,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return config, tensors


def _delta_net(random: Random, prefix: str, keys: int, values: int, heads: int) -> Tensors:
    return {
        f"{prefix}.in_proj_qkvz.weight": random.weight(2 * keys + 2 * values, HIDDEN),
        f"{prefix}.in_proj_ba.weight": random.weight(2 * heads, HIDDEN),
        f"{prefix}.conv1d.weight": random.weight(2 * keys + values, 1, CONVOLUTION, std=0.3),
        f"{prefix}.A_log": random.norm(heads).float(),
        f"{prefix}.dt_bias": random.weight(heads, std=1.0).float(),
        f"{prefix}.norm.weight": random.norm(values // heads),
        f"{prefix}.out_proj.weight": random.weight(HIDDEN, values),
    }
