//! `pointsman workers`.

use std::{io::IsTerminal as _, process::ExitCode, time::Duration};

use clap::Args;

use crate::{
    answer::GatewayError,
    api::{Worker, Workers},
    block_on,
    gateway::{Gateway, GatewayArgs},
    print,
    text::{Column, NONE, Table, clean, millis, moment, now_ms, percent},
};

/// Time between two tables of `--watch`.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);
/// Moves the cursor to the top left corner and clears the terminal.
const CLEAR: &str = "\u{1b}[H\u{1b}[2J";

/// Arguments of `workers`.
#[derive(Debug, Args)]
pub struct WorkersArgs {
    /// Print the JSON of `GET /workers` unchanged.
    #[arg(long)]
    json: bool,
    /// Print the table again whenever it changed, until Ctrl-C.
    #[arg(long, conflicts_with = "json")]
    watch: bool,
    #[command(flatten)]
    gateway: GatewayArgs,
}

impl WorkersArgs {
    pub(crate) fn run(&self) -> anyhow::Result<ExitCode> {
        let gateway = self.gateway.client()?;
        block_on(async {
            if self.watch {
                return watch(&gateway).await;
            }
            let answer = gateway.get("/workers").await?;
            if self.json {
                return answer.print_json();
            }
            print(&table(&answer.read::<Workers>()?.workers))?;
            Ok(ExitCode::SUCCESS)
        })
    }
}

/// Prints the table whenever it changed. The first call has to succeed; later ones are tried again.
async fn watch(gateway: &Gateway) -> anyhow::Result<ExitCode> {
    let clear = if std::io::stdout().is_terminal() { CLEAR } else { "" };
    let mut shown = workers_text(gateway).await?;
    loop {
        print(&format!("{clear}{}\n{shown}", moment(now_ms())))?;
        let next = loop {
            tokio::time::sleep(WATCH_INTERVAL).await;
            // A refusal of the gateway is final, so it is not retried.
            let next = match self::workers_text(gateway).await {
                Err(error @ GatewayError::Refused { .. }) => return Err(error.into()),
                Err(error) => format!("{}\n", clean(&error.to_string())),
                Ok(table) => table,
            };
            if next != shown {
                break next;
            }
        };
        shown = next;
    }
}

async fn workers_text(gateway: &Gateway) -> Result<String, GatewayError> {
    Ok(table(&gateway.get("/workers").await?.read::<Workers>()?.workers))
}

fn table(workers: &[Worker]) -> String {
    if workers.is_empty() {
        return "no worker is registered; add one to the configuration or with POST /workers\n".to_owned();
    }
    let mut table = Table::new(&[
        Column::Left("ID"),
        Column::Left("ROLE"),
        Column::Left("ENGINE"),
        Column::Left("STATE"),
        Column::Right("ACTIVE"),
        Column::Right("HANDOFFS"),
        Column::Right("RUNNING"),
        Column::Right("QUEUE"),
        Column::Right("KV"),
        Column::Right("TTFT"),
        Column::Right("ITL"),
        Column::Right("ERRORS"),
        Column::Left("MODELS"),
        Column::Left("URL"),
        Column::Left("REASON"),
    ]);
    for worker in workers {
        let load = worker.engine_load.as_ref();
        let count = |count: Option<u64>| count.map_or(NONE.to_owned(), |count| count.to_string());
        table.row(vec![
            worker.id.to_string(),
            worker.spec.role.clone(),
            worker.spec.engine.clone(),
            worker.state().to_owned(),
            worker.active().to_string(),
            worker.open_handoffs.to_string(),
            count(load.and_then(|load| load.running)),
            count(load.and_then(|load| load.waiting)),
            percent(load.and_then(|load| load.kv_usage)),
            millis(worker.ttft_ms()),
            millis(worker.itl_ms()),
            percent(Some(worker.errors())),
            if worker.models.is_empty() { NONE.to_owned() } else { worker.models.join(",") },
            worker.spec.url.clone(),
            worker.reason.clone().unwrap_or_default(),
        ]);
    }
    table.text()
}
