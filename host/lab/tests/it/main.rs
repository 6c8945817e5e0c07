//! Simulations of whole fleets, and documents whose figures follow from them, in one program.

mod agent_programs;
mod closed_loop;
mod gateways;
mod hot_prompt;
mod outputs;
mod pair_sessions;
mod scale_figures;
mod simulation;
