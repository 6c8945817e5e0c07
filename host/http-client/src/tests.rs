//! What each client does, seen from a server.

use std::{
    io::{Read as _, Write as _},
    net::TcpListener,
    thread::{self, JoinHandle},
};

use super::*;

/// Answers one request with these bytes. Returns its URL and, later, the head of the request.
fn server(answer: String) -> (String, JoinHandle<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let head = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut head = [0; 4096];
        let length = stream.read(&mut head).unwrap();
        stream.write_all(answer.as_bytes()).unwrap();
        String::from_utf8_lossy(&head[..length]).into_owned()
    });
    (url, head)
}

fn plain() -> Client {
    Setup { roots: Roots::of("http://a"), ..Setup::default() }.build().unwrap()
}

#[tokio::test]
async fn a_redirect_is_an_answer_and_the_request_names_its_program() {
    let (url, head) = server("HTTP/1.1 302 Found\r\nlocation: /b\r\ncontent-length: 0\r\n\r\n".to_owned());
    let answer = plain().get(url).send().await.unwrap();
    assert_eq!(answer.status(), 302);
    let head = head.join().unwrap().to_lowercase();
    assert!(head.contains(concat!("user-agent: pointsman/", env!("CARGO_PKG_VERSION"))), "{head}");
}

#[tokio::test]
async fn a_body_has_a_limit() {
    for (limit, fits) in [(100, true), (99, false)] {
        let (url, _) = server(format!("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{}", "x".repeat(100)));
        let body = whole(plain().get(url).send().await.unwrap(), limit).await;
        let expected = if fits { Ok(100) } else { Err("the answer has more than 99 bytes".to_owned()) };
        assert_eq!(body.map(|body| body.len()).map_err(|error| error.to_string()), expected);
    }
    let (url, _) = server("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nx".to_owned());
    let body = whole(plain().get(url).send().await.unwrap(), 100).await;
    assert!(matches!(body, Err(BodyError::Broken(_))), "{body:?}");
}

#[test]
fn a_file_that_cannot_be_used_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ca.pem");
    let missing = Pem::read("--tls-ca ca.pem", &file).unwrap_err().to_string();
    assert!(missing.starts_with("--tls-ca ca.pem: No such file"), "{missing}");
    std::fs::write(&file, vec![b'x'; 4 * 1024 * 1024 + 1]).unwrap();
    let large = Pem::read("--tls-ca ca.pem", &file).unwrap_err().to_string();
    assert_eq!(large, "--tls-ca ca.pem: the file has more than 4194304 bytes");

    let text = || Pem::new("ca.pem", "no certificate");
    for roots in [Roots::Only(text()), Roots::SystemAnd(text())] {
        let none = Setup { roots, ..Setup::default() }.build().unwrap_err().to_string();
        assert_eq!(none, "ca.pem: the file has no certificate");
    }
    let own = Some((Pem::new("cert.pem", "no certificate"), Pem::new("key.pem", "no key")));
    let own = Setup { roots: Roots::None, identity: own, ..Setup::default() }.build().unwrap_err();
    assert!(own.to_string().starts_with("cert.pem, key.pem: expected a certificate and its "), "{own}");
}

#[test]
fn a_private_key_is_in_no_log() {
    assert_eq!(format!("{:?}", Pem::new("key.pem", "SECRET")), "Pem(\"key.pem\")");
}
