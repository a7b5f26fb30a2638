//! The CPU backend from outside: against Hugging Face, against a plain reimplementation, against itself.

mod architectures;
mod evictions;
mod golden;
mod invariance;
mod masses;
mod reference;
mod speed;
mod steering;
mod support;
