"""A run so small that it takes seconds."""

from irminsul.checkpoints.deepseek_form import DeepseekShape
from training.config import TrainingConfig

VOCABULARY = 320
N_LONG, N_SHORT = 12, 10
TINY = TrainingConfig(
    theta=50.0,
    # Four of sixteen coordinates stand, which with the values need 40 of 48 directions: 8 are left out.
    shape=DeepseekShape(latent=40, nope_dim=8, rope_dim=24),
    attention_rank=6,
    mlp_rank=4,
    long=48,
    short=16,
    watched=3,
    watched_length=40,
    learning_rate=2e-2,
    total_minutes=1.0,
    tokens_per_step=96,
    logits_chunk=40,
)
