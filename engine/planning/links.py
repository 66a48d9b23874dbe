"""What the ranks of a sharded run send each other in a step, in bytes; docs/scale.md (Several GPUs) has the table.

Of b bytes that are gathered or reduced each of N ranks sends b (N - 1) / N, and receives as many. P parameters, E of
them outside of the layers, e bytes an element of the computation, t trained parameters:

    a rollout        e P                                     the whole copy
    a micro-batch    e P + e (P - E), and 4 t                policy forward and backward; gradients, float32
                     e (P - E)                               the reference's forward, where beta > 0
    an update        e E where beta > 0                      embedding and head of the reference
    a batch          e P a micro-batch                       old log-probs, where they are recomputed

Deliberately absent: evaluations, checkpoints and records, latency.
"""

from thresher.engine.planning.demand import micro_batch, trained_weights_of
from thresher.engine.planning.setting import PlanSetting
from thresher.engine.planning.sizes import FP32, all_weights, one_layer
from thresher.policy.config import ModelConfig


def sent_bytes(config: ModelConfig, s: PlanSetting) -> dict[str, float]:
    """{"rollout": .., "update": ..} that a rank sends in a step, and receives; 0 where there is one."""
    whole = s.item * all_weights(config)
    layers = s.item * config.num_hidden_layers * one_layer(config)
    tokens, _ = micro_batch(s)
    batches = -(-s.groups_of_update * s.computed_tokens // tokens)
    a_batch = whole + layers + FP32 * trained_weights_of(config, s) + (layers if s.beta else 0)
    an_update = batches * a_batch + (whole - layers if s.beta else 0)
    updates = s.updates * (an_update * s.epochs + (batches * whole if s.recomputes else 0))
    share = (s.gpus - 1) / s.gpus
    return {"rollout": whole * share, "update": updates * share}
