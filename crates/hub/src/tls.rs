//! Whom to trust: the certificates that the system has. Mozilla's list as a crate would make the program a quarter of a
//! megabyte larger, would age with it, and would not know the ones that a company adds.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, TlsProvider, parse_pem};

use crate::error::{HubError, Result};

/// Where systems keep them, in one file: Debian and Arch; Fedora; openSUSE; macOS, Alpine and BSD; Fedora's own place.
const BUNDLES: [&str; 5] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
];

/// What checks servers: the system's certificates, and ring for the arithmetic.
pub fn config() -> Result<TlsConfig> {
    let set = std::env::var_os("SSL_CERT_FILE").filter(|path| !path.is_empty()).map(PathBuf::from);
    let places = set.map_or_else(|| BUNDLES.iter().map(PathBuf::from).collect(), |path| vec![path]);
    let certificates = places.iter().map(|path| read(path)).find(|found| !found.is_empty());
    let certificates = certificates.ok_or_else(|| {
        let shown: Vec<_> = places.iter().map(|path| path.display().to_string()).collect();
        HubError::NoCertificates { looked_for: shown.join(", ") }
    })?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    Ok(TlsConfig::builder()
        .provider(TlsProvider::Rustls)
        .unversioned_rustls_crypto_provider(provider)
        .root_certs(RootCerts::new_with_certs(&certificates))
        .build())
}

fn read(path: &Path) -> Vec<Certificate<'static>> {
    let pem = weights::plain_file::read_plain(path).unwrap_or_default();
    let certificates = parse_pem(&pem).filter_map(|item| match item {
        Ok(PemItem::Certificate(certificate)) => Some(certificate),
        _ => None,
    });
    certificates.collect()
}
