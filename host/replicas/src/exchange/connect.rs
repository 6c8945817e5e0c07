//! One connection to NATS. It is not repaired: a lost one is replaced, with files that are read again.

use std::{io, path::Path, time::Duration};

use async_nats::{Client, ConnectOptions, Event, ServerAddr, ServerError, Subject, Subscriber};
use tokio::sync::mpsc;

use super::denials::Denial;
use crate::{
    config::{Credentials, ReplicasConfig},
    wire::VERSION,
};

mod advice;

/// Longest time that connecting to one server may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum number of messages that wait to be read, and to be written.
const READ_QUEUE: usize = 4_096;
const WRITE_QUEUE: usize = 64;
/// Maximum number of refusals that wait to be read.
const DENIED_QUEUE: usize = 8;
/// Maximum size of a file with a secret, bytes.
const MAX_SECRET: u64 = 64 * 1024;

/// A connection with a subscription to all gateways of the fleet.
pub(super) struct Connection {
    pub(super) client: Client,
    /// Subject of this gateway.
    pub(super) subject: Subject,
    /// Subject of all gateways of the fleet.
    pub(super) fleet: Subject,
    /// Messages of the others.
    pub(super) messages: Subscriber,
    /// Tells why the connection was lost.
    pub(super) lost: mpsc::Receiver<String>,
    /// Tells what the user of this gateway may not do. The connection continues.
    pub(super) denied: mpsc::Receiver<Denial>,
    /// Address of the server, for the log.
    pub(super) server: String,
}

/// Reason why the connection failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    #[error("cannot read {what} {path}: {error}; check the path and its permissions")]
    File { what: &'static str, path: String, error: io::Error },
    #[error("`{url}` is not the URL of a NATS server: {error}")]
    Url { url: String, error: io::Error },
    #[error("cannot connect to NATS: {0}")]
    Connect(String),
    #[error("no server answered within {0:?}")]
    Timeout(Duration),
}

/// Connects to one of the servers and subscribes.
pub(super) async fn connect(config: ReplicasConfig) -> Result<Connection, ConnectError> {
    let (lost_sender, lost) = mpsc::channel(1);
    let (denied_sender, denied) = mpsc::channel(DENIED_QUEUE);
    let options = options(&config, lost_sender, denied_sender).await?;
    let mut servers = Vec::new();
    for url in &config.servers {
        let address = url.parse::<ServerAddr>();
        servers.push(address.map_err(|error| ConnectError::Url { url: url.clone(), error })?);
    }
    let subjects = format!("pointsman.{}.v{VERSION}", config.fleet);
    let limit = CONNECT_TIMEOUT * u32::try_from(servers.len().max(1)).unwrap_or(1) + CONNECT_TIMEOUT;
    let fleet: Subject = format!("{subjects}.*").into();
    let connecting = async {
        let client = match options.connect(servers).await {
            Ok(client) => client,
            Err(error) => {
                let problem = chain(&error);
                let advice = advice::advice_on(&config, &error, &problem).await;
                return Err(ConnectError::Connect(problem + &advice));
            }
        };
        let messages = client.subscribe(fleet.clone()).await;
        let messages = messages.map_err(|error| ConnectError::Connect(chain(&error)))?;
        Ok((client, messages))
    };
    let connected = tokio::time::timeout(limit, connecting).await;
    let (client, messages) = connected.map_err(|_| ConnectError::Timeout(limit))??;
    let info = client.server_info();
    let server = format!("{} {}:{}", info.server_name, info.host, info.port);
    let subject = format!("{subjects}.{}", config.name).into();
    Ok(Connection { client, subject, fleet, messages, lost, denied, server })
}

async fn options(
    config: &ReplicasConfig,
    lost: mpsc::Sender<String>,
    denied: mpsc::Sender<Denial>,
) -> Result<ConnectOptions, ConnectError> {
    let mut options = ConnectOptions::new()
        .name(format!("pointsman {}", config.name))
        .no_echo()
        // Credentials go to the servers that the operator names.
        .ignore_discovered_servers()
        .max_reconnects(config.servers.len())
        .connection_timeout(CONNECT_TIMEOUT)
        // A connection that is silent for three of these is lost.
        .ping_interval((config.lease / 4).clamp(Duration::from_millis(50), Duration::from_secs(10)))
        .subscription_capacity(READ_QUEUE)
        .client_capacity(WRITE_QUEUE)
        .event_callback(move |event| {
            report(event, &lost, &denied);
            std::future::ready(())
        });
    options = match &config.credentials {
        Credentials::None => options,
        Credentials::User(user, file) => {
            options.user_and_password(user.clone(), secret("the password file", file).await?)
        }
        Credentials::Token(file) => options.token(secret("the token file", file).await?),
        Credentials::NKey(file) => {
            let what = "the NKey file";
            let seed = secret(what, file).await?;
            nkeys::KeyPair::from_seed(&seed)
                .map_err(|error| file_error(what, file, io::Error::other(error)))?;
            options.nkey(seed)
        }
        Credentials::Jwt(file) => {
            // The library needs the end of the last line.
            let text = secret("the credentials file", file).await? + "\n";
            options.credentials(&text).map_err(|error| file_error("the credentials file", file, error))?
        }
    };
    let Some(tls) = &config.tls else { return Ok(options) };
    options = options.require_tls(true);
    if let Some(ca) = &tls.ca {
        options = options.add_root_certificates(ca.clone());
    }
    if let Some((certificate, key)) = &tls.client {
        options = options.add_client_certificate(certificate.clone(), key.clone());
    }
    Ok(options)
}

/// Reports why the connection was lost, or what the server refuses.
fn report(event: Event, lost: &mpsc::Sender<String>, denied: &mpsc::Sender<Denial>) {
    let problem = match event {
        Event::Disconnected => "connection lost".to_owned(),
        Event::Closed => "connection closed".to_owned(),
        Event::LameDuckMode => "server is shutting down".to_owned(),
        Event::ServerError(error) => {
            if let ServerError::Other(text) = &error
                && let Some(denial) = Denial::of(text)
            {
                let _ = denied.try_send(denial);
                return;
            }
            format!("server error: {error}")
        }
        _ => return,
    };
    let _ = lost.try_send(problem);
}

/// Reads a file with a secret, without the end of its line.
async fn secret(what: &'static str, path: &Path) -> Result<String, ConnectError> {
    use tokio::io::AsyncReadExt as _;
    let read = async {
        // Opening a pipe that has no writer blocks.
        if !tokio::fs::metadata(path).await?.is_file() {
            return Err(io::Error::other("it is not a regular file"));
        }
        let mut text = String::new();
        tokio::fs::File::open(path).await?.take(MAX_SECRET).read_to_string(&mut text).await?;
        Ok(text.trim_end_matches(['\r', '\n']).to_owned())
    };
    read.await.map_err(|error| file_error(what, path, error))
}

fn file_error(what: &'static str, path: &Path, error: io::Error) -> ConnectError {
    ConnectError::File { what, path: path.display().to_string(), error }
}

/// Returns an error with its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}
