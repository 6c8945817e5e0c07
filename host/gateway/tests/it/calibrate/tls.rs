//! Servers with TLS.

use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
};

use super::{Engine, Flaw, calibrate, text};
use crate::authority::Authority;

/// TLS in front of an engine. Returns its URL.
async fn secured(engine: &str, authority: &Authority) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("https://{}", listener.local_addr().expect("an address"));
    let (engine, acceptor) = (engine.trim_start_matches("http://").to_owned(), authority.acceptor());
    let serve = async move {
        let mut connections = tokio::task::JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            let (engine, acceptor) = (engine.clone(), acceptor.clone());
            connections.spawn(async move {
                let mut client = acceptor.accept(stream).await?;
                copy_bidirectional(&mut client, &mut TcpStream::connect(engine).await?).await
            });
        }
    };
    tokio::runtime::Handle::current().spawn(serve);
    url
}

#[tokio::test(flavor = "multi_thread")]
async fn j4_a_server_with_tls_needs_a_trusted_authority() {
    let directory = tempfile::tempdir().expect("a directory");
    let (engine, _) = Engine::start(Flaw::None).await;
    let authority = Authority::new("127.0.0.1");
    let url = secured(&engine, &authority).await;
    std::fs::write(directory.path().join("ca.pem"), &authority.pem).expect("a file");
    let output = calibrate(directory.path(), &["--url", &url, "--tls-ca", "ca.pem", "--dry-run"]).await;
    // J4.8
    assert!(output.status.success(), "{}", text(&output.stderr));
    std::fs::write(directory.path().join("other.pem"), Authority::new("127.0.0.1").pem).expect("a file");
    let output = calibrate(directory.path(), &["--url", &url, "--tls-ca", "other.pem", "--dry-run"]).await;
    let told = text(&output.stderr);
    // J4.8
    assert!(output.status.code() == Some(2) && told.contains("no trusted authority"), "{told}");
}
