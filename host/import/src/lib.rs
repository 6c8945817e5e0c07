//! `pointsman import`: turns the configuration of another router into one of Pointsman, with a comment beside
//! each translated part and a report of what has no counterpart.
//!
//! The crate writes text. It does not know the gateway's configuration types: a test runs `check-config` on
//! each result. Source and result of an import are the operator's, so nothing of them is sent anywhere.

use std::{io::Write as _, path::PathBuf, process::ExitCode};

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand};

mod draft;
mod input;
mod kubernetes;
mod llm_d;
mod output;
mod report;
mod router;
mod yaml;

use draft::Draft;
use report::{Report, plain};
use router::Flavor;

/// Sources of a configuration.
#[derive(Debug, Subcommand)]
pub enum ImportCommand {
    /// Translate an `EndpointPickerConfig` of llm-d's router or of the Gateway API Inference Extension.
    #[command(name = "llm-d")]
    LlmD(Box<LlmDArgs>),
    /// Translate a command line of vllm-router.
    VllmRouter(RouterArgs),
    /// Translate a command line of production-stack's router, which is called vllm-router, too.
    ProductionStack(RouterArgs),
    /// Translate a command line of sglang-router (SGLang Model Gateway, `smg`).
    #[command(visible_alias = "smg")]
    SglangRouter(RouterArgs),
    /// Any other name.
    #[command(external_subcommand)]
    Other(Vec<String>),
}

/// Arguments of `import llm-d`.
#[derive(Debug, Args)]
pub struct LlmDArgs {
    /// YAML or JSON file with the configuration, also inside a `ConfigMap` or Helm values; `-` reads stdin.
    file: PathBuf,
    /// Label selector of the engines' pods, as in the `InferencePool`: writes `[[discovery.kubernetes]]`.
    #[arg(long, value_name = "KEY=VALUE,…")]
    selector: Option<String>,
    /// Namespace of the pods.
    #[arg(long, default_value = "default", requires = "selector")]
    namespace: String,
    /// Number or name of the engines' port.
    #[arg(long, default_value = "8000", requires = "selector")]
    port: String,
    /// Dialect of the engines.
    #[arg(long, default_value = "vllm", value_parser = ["vllm", "sglang", "trtllm", "openai"])]
    engine: String,
    /// Answer Envoy in the place of the endpoint picker: writes `[ext_proc]` for port 9002.
    #[arg(long)]
    ext_proc: bool,
    #[command(flatten)]
    output: OutputArgs,
}

/// Arguments of the imports of a command line.
#[derive(Debug, Args)]
pub struct RouterArgs {
    #[command(flatten)]
    output: OutputArgs,
    /// The command line, with or without the program's name.
    #[arg(last = true, required = true, value_name = "ARGUMENT")]
    arguments: Vec<String>,
}

/// Destination of the result, and what counts as a failure.
#[derive(Debug, Args)]
struct OutputArgs {
    /// Write the configuration to this file instead of stdout. The file must not exist.
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Replace the file if it exists.
    #[arg(long, requires = "output")]
    force: bool,
    /// End with code 1 when something has no counterpart.
    #[arg(long)]
    strict: bool,
}

/// Result of an import.
#[derive(Debug, Default)]
struct Imported {
    draft: Draft,
    report: Report,
}

impl ImportCommand {
    /// Runs the command: writes the configuration, then the report to stderr.
    ///
    /// # Errors
    /// The source cannot be read or is not what it should be, or the result cannot be written.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::LlmD(args) => args.run(),
            Self::VllmRouter(args) => args.run(Flavor::Vllm),
            Self::ProductionStack(args) => args.run(Flavor::Production),
            Self::SglangRouter(args) => args.run(Flavor::Sglang),
            Self::Other(words) => bail!(
                "there is no import from `{}`: there are llm-d, vllm-router, production-stack and sglang-router; \
                 docs/import.md says under \"Without an import\" what to write for Dynamo, AIBrix and others",
                plain(words.first().map_or("", String::as_str))
            ),
        }
    }
}

impl LlmDArgs {
    fn run(self) -> anyhow::Result<ExitCode> {
        let text = input::read(&self.file)?;
        let target = llm_d::Target {
            selector: self.selector,
            namespace: self.namespace,
            port: self.port,
            engine: self.engine,
            ext_proc: self.ext_proc,
        };
        let shown = self.file.display().to_string();
        let imported = llm_d::import(&text, &target).with_context(|| format!("cannot import `{shown}`"))?;
        self.output.finish(&imported, &format!("llm-d's configuration {shown}"))
    }
}

impl RouterArgs {
    fn run(self, flavor: Flavor) -> anyhow::Result<ExitCode> {
        let source = format!("a command line of {}", flavor.name());
        let imported =
            router::import(flavor, &self.arguments).with_context(|| format!("cannot import {source}"))?;
        self.output.finish(&imported, &source)
    }
}

impl OutputArgs {
    /// Writes the configuration and the report, and returns the exit code.
    fn finish(&self, imported: &Imported, source: &str) -> anyhow::Result<ExitCode> {
        let text = imported.draft.text(source);
        match &self.output {
            Some(path) => output::write_file(path, &text, self.force)?,
            None => std::io::stdout().lock().write_all(text.as_bytes()).context("cannot write to stdout")?,
        }
        std::io::stderr().lock().write_all(imported.report.text().as_bytes())?;
        let failed = self.strict && imported.report.has_missing();
        Ok(if failed { ExitCode::from(1) } else { ExitCode::SUCCESS })
    }
}
