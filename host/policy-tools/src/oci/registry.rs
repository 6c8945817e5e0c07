//! Policies in a registry, over the protocol of the OCI distribution specification.
//!
//! A registry is a stranger: every body that it sends has a limit, every wait a deadline, and credentials go
//! to the registry and its token server only.

use std::{path::PathBuf, time::Duration};

use anyhow::Context as _;
use clap::Args;
use indicatif::ProgressBar;
use reqwest::{
    Method, StatusCode, Url,
    header::{ACCEPT, CONTENT_TYPE, HeaderValue, LOCATION},
};
use tokio::time::Instant;

use self::{
    body::Reader,
    credentials::Credentials,
    error::RegistryError,
    session::{Call, Scope, Session},
};
use super::artifact::{Artifact, Blob, Descriptor, MANIFEST, Manifest};
use crate::{output::transfer_bar, place::Reference};

mod auth;
mod body;
mod connect;
mod credentials;
mod error;
mod helper;
mod session;

/// Largest manifest that is read, bytes: what registries have to accept.
const MAX_MANIFEST_BYTES: u64 = 4 << 20;
/// Longest time without progress: until an answer begins, or between two parts of a body.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Header of an answer with the digest of its content.
const CONTENT_DIGEST: &str = "docker-content-digest";
/// Media type of uploaded content.
const OCTETS: &str = "application/octet-stream";

/// Options of registries.
#[derive(Debug, Args)]
#[command(next_help_heading = "Registries")]
pub(crate) struct RegistryArgs {
    /// Reach the registry and its token server without TLS. A registry on a loopback address is reached
    /// without TLS unless --tls-ca is given.
    #[arg(long, conflicts_with = "tls_ca")]
    plain_http: bool,
    /// PEM file with further root certificates, for a registry with a private authority.
    #[arg(long, value_name = "FILE")]
    tls_ca: Option<PathBuf>,
    /// Longest time for the whole transfer, in seconds. The transfer also ends after 60 s without progress.
    #[arg(long, value_name = "SECONDS", default_value_t = 600,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
}

impl RegistryArgs {
    /// Uploads what the registry lacks of the artifact and returns the manifest's digest.
    pub(crate) fn push(&self, reference: &Reference, artifact: &Artifact) -> anyhow::Result<String> {
        self.block_on(push(self, reference, artifact)).with_context(|| format!("cannot push {reference}"))
    }

    /// Downloads an artifact, checks every digest, and returns it with the manifest's digest.
    pub(crate) fn pull(&self, reference: &Reference) -> anyhow::Result<(Artifact, String)> {
        self.block_on(pull(self, reference)).with_context(|| format!("cannot pull {reference}"))
    }

    fn block_on<T>(&self, transfer: impl Future<Output = Result<T, RegistryError>>) -> anyhow::Result<T> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let limit = Duration::from_secs(self.timeout);
        let done = runtime.block_on(async { tokio::time::timeout(limit, transfer).await });
        // A name lookup may still hang on a thread of its own.
        runtime.shutdown_background();
        let late = || {
            let problem = format!("the transfer did not end within {} s", self.timeout);
            RegistryError::new(problem, "check the registry, or allow more time with --timeout")
        };
        Ok(done.unwrap_or_else(|_| Err(late()))?)
    }

    /// Longest time without progress.
    fn idle(&self) -> Duration {
        IDLE_TIMEOUT.min(Duration::from_secs(self.timeout))
    }

    async fn session<'a>(
        &self,
        reference: &'a Reference,
        scope: Scope,
        bar: &ProgressBar,
    ) -> Result<Session<'a>, RegistryError> {
        let credentials = Credentials::find(reference).await?;
        let http = connect::Connection::new(reference, self.plain_http, self.tls_ca.as_deref())?;
        let deadline = Instant::now() + Duration::from_secs(self.timeout);
        let reader = Reader::new(self.idle(), deadline, bar.clone());
        Ok(Session::new(http, reference, scope, credentials, reader))
    }
}

async fn push(
    args: &RegistryArgs,
    reference: &Reference,
    artifact: &Artifact,
) -> Result<String, RegistryError> {
    let encoded = artifact.encode();
    let digest = encoded.manifest.descriptor.digest.clone();
    if let Some(expected) = reference.digest.as_ref().filter(|expected| **expected != digest) {
        return Err(RegistryError::new(
            format!("the policy's manifest has the digest {digest}, the reference says {expected}"),
            "push to a tag, or to the digest of this policy",
        ));
    }
    let size = encoded.layer.descriptor.size + encoded.config.descriptor.size;
    let bar = transfer_bar(size, format!("pushing {reference}"));
    let mut session = args.session(reference, Scope::PullPush, &bar).await?;
    for blob in [encoded.layer, encoded.config] {
        upload(&mut session, blob).await?;
    }
    let call = Call::new(Method::PUT, session.manifest_url()?)
        .with_header(CONTENT_TYPE, HeaderValue::from_static(MANIFEST))
        .with_body(encoded.manifest.bytes.into());
    let answer = session.send(&call).await?;
    if !answer.status().is_success() {
        return Err(session.refused(&call, answer).await);
    }
    match answer.headers().get(CONTENT_DIGEST).map(HeaderValue::as_bytes) {
        Some(found) if found != digest.as_bytes() => Err(RegistryError::new(
            format!(
                "the registry stored the manifest {digest} as \"{}\"",
                error::clean(&String::from_utf8_lossy(found))
            ),
            "it changed the content: do not use this tag, and check what stands before the registry",
        )),
        _ => Ok(digest),
    }
}

/// Uploads a blob in one request, unless the registry has it.
async fn upload(session: &mut Session<'_>, blob: Blob) -> Result<(), RegistryError> {
    let Descriptor { digest, size, .. } = blob.descriptor;
    let known = session.send(&Call::new(Method::HEAD, session.url(&format!("blobs/{digest}"))?)).await?;
    if known.status() == StatusCode::OK {
        session.reader().skip(size);
        return Ok(());
    }
    let begin = Call::new(Method::POST, session.url("blobs/uploads/")?).with_body(bytes::Bytes::new());
    let answer = session.send(&begin).await?;
    if answer.status() != StatusCode::ACCEPTED {
        return Err(session.refused(&begin, answer).await);
    }
    let mut target = match answer.headers().get(LOCATION) {
        Some(location) => session.resolve(answer.url(), location)?,
        None => {
            return Err(RegistryError::new(
                format!("the registry's answer to {begin} has no header Location"),
                "check that the host is an OCI registry",
            ));
        }
    };
    target.query_pairs_mut().append_pair("digest", &digest);
    let put = Call::new(Method::PUT, target)
        .with_header(CONTENT_TYPE, HeaderValue::from_static(OCTETS))
        .with_body(blob.bytes.into());
    let answer = session.send(&put).await?;
    if answer.status().is_success() { Ok(()) } else { Err(session.refused(&put, answer).await) }
}

async fn pull(args: &RegistryArgs, reference: &Reference) -> Result<(Artifact, String), RegistryError> {
    let bar = transfer_bar(0, format!("pulling {reference}"));
    let mut session = args.session(reference, Scope::Pull, &bar).await?;
    let (bytes, digest) = pull_manifest(&mut session, reference).await?;
    let malformed = |problem: String| {
        let advice = "pull a policy that `pointsman policy push` or another Wasm tool pushed";
        RegistryError::new(format!("the manifest {digest} is not one of a policy: {problem}"), advice)
    };
    let manifest = Manifest::parse(&bytes).map_err(malformed)?;
    let layer = manifest.layer().map_err(malformed)?;
    bar.set_length(manifest.config.bounded_size()?.saturating_add(layer.bounded_size()?));
    download(&mut session, &manifest.config).await?;
    let wasm = download(&mut session, layer).await?;
    Ok((manifest.into_artifact(wasm), digest))
}

/// Downloads a manifest and returns it with its digest.
async fn pull_manifest(
    session: &mut Session<'_>,
    reference: &Reference,
) -> Result<(Vec<u8>, String), RegistryError> {
    let call = Call::new(Method::GET, session.manifest_url()?)
        .with_header(ACCEPT, HeaderValue::from_static(MANIFEST));
    let answer = session.send(&call).await?;
    if answer.status() != StatusCode::OK {
        return Err(session.refused(&call, answer).await);
    }
    let claimed = answer.headers().get(CONTENT_DIGEST).and_then(|digest| digest.to_str().ok());
    let claimed = claimed.filter(|digest| digest.starts_with("sha256:")).map(str::to_owned);
    let bytes = session.reader().read(answer, &call.to_string(), MAX_MANIFEST_BYTES).await?;
    let found = format!("sha256:{}", pointsman_policy_runtime::digest(&bytes));
    for (who, expected) in [("the reference", &reference.digest), ("the registry", &claimed)] {
        if let Some(expected) = expected.as_ref().filter(|expected| **expected != found) {
            let expected = error::clean(expected);
            return Err(RegistryError::new(
                format!("the manifest has the digest {found}, {who} says {expected}; it was changed or cut"),
                "check what stands between you and the registry, or push the policy again",
            ));
        }
    }
    Ok((bytes, found))
}

/// Downloads a blob and checks its size and digest.
async fn download(session: &mut Session<'_>, blob: &Descriptor) -> Result<Vec<u8>, RegistryError> {
    blob.hex()?;
    let size = blob.bounded_size()?;
    let url: Url = session.url(&format!("blobs/{}", blob.digest))?;
    let call = Call::new(Method::GET, url);
    let answer = session.send(&call).await?;
    if answer.status() != StatusCode::OK {
        return Err(session.refused(&call, answer).await);
    }
    let bytes = session.reader().read(answer, &call.to_string(), size).await?;
    blob.check(&bytes)?;
    Ok(bytes)
}
