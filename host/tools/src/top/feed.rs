//! Keeps the model up to date, in a thread of its own: reads events, connects again, and sends commands.

use std::{
    sync::{Arc, mpsc::SyncSender},
    time::Duration,
};

use parking_lot::Mutex;
use pointsman_admin_cli::{
    Gateway, GatewayError, after_drain, after_undrain,
    text::{moment, now_ms},
};
use serde::de::IgnoredAny;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc::Receiver,
};

use super::{
    Input,
    events::Events,
    model::{Change, Model},
};

/// Pause before the first new connection; it doubles up to the second.
const RECONNECT: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(5));

/// Runs until the gateway refuses or a signal asks for the end.
pub(super) async fn run(
    gateway: &Gateway,
    model: &Mutex<Model>,
    mut changes: Receiver<Change>,
    inputs: &SyncSender<Input>,
) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hang_up = signal(SignalKind::hangup())?;
    let mut pause = RECONNECT.0;
    let reading = async {
        loop {
            let error = read(gateway, model, &mut pause).await;
            if matches!(error, GatewayError::Refused { status: 401 | 403, .. }) {
                return Err(error);
            }
            model.lock().lost.get_or_insert_with(|| (now(), error.to_string()));
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RECONNECT.1);
        }
    };
    let commands = async {
        while let Some(change) = changes.recv().await {
            let message = execute(gateway, change).await;
            model.lock().message = Some(message);
        }
    };
    tokio::select! {
        refused = reading => { let _ = inputs.send(Input::End(refused.map_err(anyhow::Error::from))); }
        () = commands => {}
        _ = terminate.recv() => { let _ = inputs.send(Input::End(Ok(()))); }
        _ = hang_up.recv() => { let _ = inputs.send(Input::End(Ok(()))); }
    }
    Ok(())
}

/// Reads events until the connection breaks.
async fn read(gateway: &Gateway, model: &Mutex<Model>, pause: &mut Duration) -> GatewayError {
    let mut events = match Events::open(gateway).await {
        Ok(events) => events,
        Err(error) => return error,
    };
    loop {
        match events.next().await {
            Ok(event) => {
                let mut model = model.lock();
                if let Err(error) = model.apply(&event) {
                    let problem = format!("event `{}`: {error}", event.kind);
                    return GatewayError::Unreachable { url: model.url.clone(), problem };
                }
                model.lost = None;
                *pause = RECONNECT.0;
            }
            Err(error) => return error,
        }
    }
}

async fn execute(gateway: &Gateway, change: Change) -> String {
    let path = format!("/workers/{}/drain", change.worker);
    let answer = if change.undo { gateway.delete(&path).await } else { gateway.post(&path).await };
    let told = match answer.and_then(|answer| answer.read::<IgnoredAny>()) {
        Ok(_) if change.undo => after_undrain(gateway, change.worker).await,
        Ok(_) => after_drain(gateway, change.worker).await,
        Err(error) => Err(error),
    };
    told.unwrap_or_else(|error| error.to_string())
}

/// Reads events until every kind arrived that a frame shows.
pub(super) async fn once(gateway: &Gateway, limit: Duration) -> anyhow::Result<Model> {
    let mut model = Model { url: gateway.url().to_owned(), ..Model::default() };
    let complete = async {
        let mut events = Events::open(gateway).await?;
        while !model.is_complete() {
            let event = events.next().await?;
            model.apply(&event).map_err(|error| GatewayError::Unreachable {
                url: gateway.url().to_owned(),
                problem: format!("event `{}`: {error}", event.kind),
            })?;
        }
        Ok::<_, GatewayError>(())
    };
    let late = GatewayError::Late { url: format!("{}/events", gateway.url()), limit };
    tokio::time::timeout(limit, complete).await.unwrap_or(Err(late))?;
    Ok(model)
}

/// A model that threads share.
pub(super) fn shared(gateway: &Gateway) -> Arc<Mutex<Model>> {
    Arc::new(Mutex::new(Model { url: gateway.url().to_owned(), ..Model::default() }))
}

fn now() -> String {
    let text = moment(now_ms());
    // The time of the day, UTC.
    text.get(11..19).map(|time| format!("{time}Z")).unwrap_or(text)
}
