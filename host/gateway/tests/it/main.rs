//! The programs as users run them, and files that are delivered with them: one file for each concern, all in
//! one program, since each program links the whole gateway.

mod admin_commands;
mod authority;
mod calibrate;
mod check_config;
mod check_sources;
mod compare;
mod config_changes;
mod config_commands;
mod demo;
mod expired_certificates;
mod formula_files;
mod helm_chart;
mod import;
mod import_parity;
mod key_command;
mod kubernetes_files;
mod log_output;
mod operators_view;
mod other_programs;
mod planned_stops;
mod policy_cases;
mod policy_commands;
mod policy_dev;
mod policy_files;
mod process;
mod programs;
mod readme;
mod registry;
mod script_builds;
mod service_manager;
mod signals;
