//! The policy runtime on real components and folders: one file for each concern, all in one program, since
//! each program links the compiler of policies.

mod admission;
mod cache;
mod capacity;
mod compile_order;
mod limits;
mod reload;
mod slots;
mod state;
