//! Certificates of listeners that are those of an authority.

use super::*;

#[test]
fn j1_a_listener_with_the_certificate_of_an_authority_is_a_warning() {
    let dir = with_config(
        "[server]\nlisten = '127.0.0.1:0'\nadmin_listen = '127.0.0.1:0'\n\
         [server.admin_tls]\ncert_file = 'c.pem'\nkey_file = 'c.key'\n",
    );
    let check = |is_authority: bool| {
        let mut params = rcgen::CertificateParams::new(vec!["gw.example".to_owned()]).unwrap();
        if is_authority {
            params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        }
        let key = rcgen::KeyPair::generate().unwrap();
        fs::write(dir.path().join("c.pem"), params.self_signed(&key).unwrap().pem()).unwrap();
        fs::write(dir.path().join("c.key"), key.serialize_pem()).unwrap();
        let (code, out, text) = pointsman(dir.path(), &["check-config", "p.toml"]);
        assert!(code == Some(0) && out.ends_with("ok\n"), "{text}");
        text
    };
    let text = check(true);
    let expected = "warning: p.toml:5:1: server.admin_tls.cert_file: the certificate in `c.pem` is that of an authority, \
                    which `pointsman` and many clients refuse: make it with";
    // J1.8
    assert!(text.contains(expected), "{text}");
    // J1.8
    assert!(!check(false).contains("that of an authority"));
}
