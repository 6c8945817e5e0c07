//! Fleets of the programs of this repository, which are built first.

pub(crate) use build::{ENGINE, GATEWAY, LAB, POLICY, build, build_programs, target_dir};
pub(crate) use pointsman_rig::fleet::{End, EngineSpec, Fleet, Process, free_port, gateway, start};

mod build;
