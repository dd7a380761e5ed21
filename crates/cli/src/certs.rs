//! `tortie certs`: an authority for the embedded datastore, and the certificates of its service and clients.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Subcommand;
use jiff::{Timestamp, ToSpan, Zoned};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, ExtendedKeyUsagePurpose,
    IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SerialNumber,
};
use tempfile::NamedTempFile;
use tortie_store::rpc::{CertificateId, RevocationList, controllers_subject, node_subject, operator_subject};

use crate::output;

/// The DNS name by which clients know the service.
const SERVICE: &str = "tortie-store";
/// The name of the authority's files.
const AUTHORITY: &str = "authority";
/// The folder of all certificates that the authority has issued.
const ISSUED: &str = "issued";
/// How long a list of revoked certificates is valid for programs that look at that.
const LIST_VALIDITY: Duration = Duration::from_secs(3650 * 24 * 3600);

#[derive(Subcommand)]
pub(crate) enum CertsCommand {
    /// Create the authority: authority.crt, which all machines need, and authority.key, which signs and stays secret
    Authority(Folder),
    /// Issue the certificate of the service, for `tortie store serve`
    Store(Folder),
    /// Issue the certificate of a node's agent
    Node(Named),
    /// Issue the certificate of `tortie controllers`
    Controllers(Folder),
    /// Issue the certificate of a person or program that may do everything
    Operator(Named),
    /// Add certificates to the list of those that the service does not accept any more, for `tortie store serve --tls-revoked`
    Revoke(Revoke),
}

#[derive(clap::Args)]
pub(crate) struct Revoke {
    /// The certificates (PEM); tortie-certs/issued has all that were issued, also those that --renew has replaced
    #[arg(required = true, value_name = "FILE")]
    certificates: Vec<PathBuf>,
    /// The folder of the authority, where the list authority.crl is written
    #[arg(long, value_name = "FOLDER", default_value = "tortie-certs")]
    dir: PathBuf,
}

#[derive(clap::Args)]
pub(crate) struct Named {
    /// The name of the node or operator
    name: String,
    #[command(flatten)]
    folder: Folder,
}

#[derive(clap::Args)]
pub(crate) struct Folder {
    /// The folder of the authority, where the files are written
    #[arg(long, value_name = "FOLDER", default_value = "tortie-certs")]
    dir: PathBuf,
    /// For how many days the certificate is valid: by default 365, and 3650 for the authority
    #[arg(long, value_name = "DAYS", value_parser = clap::value_parser!(i64).range(1..=36_500))]
    days: Option<i64>,
    /// Replace existing files, to renew a certificate
    #[arg(long)]
    renew: bool,
}

/// A certificate and its key (PEM).
struct Issued {
    certificate: String,
    key: String,
    /// The certificate's number; none for an authority.
    number: Option<String>,
}

impl CertsCommand {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Authority(folder) => {
                if folder.renew {
                    bail!(
                        "--renew: a new authority makes all certificates invalid; use another --dir for it"
                    );
                }
                folder.write(AUTHORITY, &authority(folder.days.unwrap_or(3650))?)
            }
            Self::Store(folder) => folder.issue("store", None, SERVICE),
            Self::Revoke(revoke) => revoke.run(),
            Self::Node(Named { name, folder }) => {
                if !is_dns_name(&name) {
                    bail!(
                        "{name:?} is no name of a Node: small letters, digits, '-' and '.', as kubectl get nodes shows it"
                    );
                }
                let (organisation, common_name) = node_subject(&name);
                folder.issue(&format!("node-{name}"), Some(organisation), &common_name)
            }
            Self::Controllers(folder) => {
                let (organisation, common_name) = controllers_subject();
                folder.issue("controllers", Some(organisation), &common_name)
            }
            Self::Operator(Named { name, folder }) => {
                if !is_name_for_logs(&name) {
                    bail!(
                        "{name:?} is no name of an operator: 1 to 64 letters, digits and any of '.', '_', '-' and '@', of which a \
                         letter or digit comes first"
                    );
                }
                let (organisation, common_name) = operator_subject(&name);
                folder.issue(&format!("operator-{name}"), Some(organisation), &common_name)
            }
        }
    }
}

impl Folder {
    /// Issues a certificate of the authority in the folder.
    fn issue(&self, file: &str, organisation: Option<&str>, common_name: &str) -> anyhow::Result<ExitCode> {
        let signer = signer_in(&self.dir)?;
        self.keep_earlier(file, &signer)?;
        let pair = issue(&signer, organisation, common_name, self.days.unwrap_or(365))?;
        self.write(file, &pair)
    }

    /// Keeps a certificate that an earlier version has issued, before a renewal replaces it: only one that is there can be revoked.
    fn keep_earlier(&self, name: &str, signer: &Issued) -> anyhow::Result<()> {
        let Ok(text) = std::fs::read_to_string(self.dir.join(format!("{name}.crt"))) else { return Ok(()) };
        match CertificateId::of_pem(&text, &signer.certificate) {
            Ok(id) => self.keep(name, &number(&id), &text),
            Err(_) => Ok(()),
        }
    }

    fn keep(&self, name: &str, number: &str, certificate: &str) -> anyhow::Result<()> {
        let issued = self.dir.join(ISSUED);
        std::fs::create_dir_all(&issued).with_context(|| issued.display().to_string())?;
        let path = issued.join(format!("{name}-{number}.crt"));
        write_file(&path, certificate, true).with_context(|| path.display().to_string())
    }

    fn write(&self, name: &str, pair: &Issued) -> anyhow::Result<ExitCode> {
        std::fs::create_dir_all(&self.dir).with_context(|| self.dir.display().to_string())?;
        for ending in ["key", "crt"] {
            let path = self.dir.join(format!("{name}.{ending}"));
            if !self.renew && path.exists() {
                bail!("{} exists; --renew replaces a certificate", path.display());
            }
        }
        // The key first: a certificate is there only with its key.
        if let Some(number) = &pair.number {
            self.keep(name, number, &pair.certificate)?;
        }
        for (ending, text) in [("key", &pair.key), ("crt", &pair.certificate)] {
            let path = self.dir.join(format!("{name}.{ending}"));
            write_file(&path, text, self.renew).with_context(|| path.display().to_string())?;
            output::line(&path.display().to_string());
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Revoke {
    /// Adds the certificates to the list, and signs it again.
    fn run(self) -> anyhow::Result<ExitCode> {
        let (signer, path) = (signer_in(&self.dir)?, self.dir.join(format!("{AUTHORITY}.crl")));
        let mut list = match std::fs::read_to_string(&path) {
            Ok(text) => RevocationList::parse(&text, &signer.certificate)
                .with_context(|| path.display().to_string())?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => RevocationList::default(),
            Err(error) => return Err(error).with_context(|| path.display().to_string()),
        };
        let now = Timestamp::now().as_second();
        for certificate in &self.certificates {
            let named = || certificate.display().to_string();
            let text = std::fs::read_to_string(certificate).with_context(named)?;
            let id = CertificateId::of_pem(&text, &signer.certificate).with_context(named)?;
            output::line(&format!("{}: number {} is revoked", certificate.display(), number(&id)));
            list.0.entry(id).or_insert(now);
        }
        let text = sign(&list, &signer, now)?;
        // The name of an authority of another tool may get another form in the list, which would then name nobody.
        if RevocationList::parse(&text, &signer.certificate)? != list {
            bail!(
                "{}: the list does not name the certificates as they are; sign it by the tool of this authority",
                path.display()
            );
        }
        write_file(&path, &text, true).with_context(|| path.display().to_string())?;
        output::line(&format!("{}: {} revoked", path.display(), list.0.len()));
        Ok(ExitCode::SUCCESS)
    }
}

/// The number of a certificate in hexadecimal digits.
fn number(id: &CertificateId) -> String {
    id.serial().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The certificate and the key of the authority in a folder.
fn signer_in(dir: &Path) -> anyhow::Result<Issued> {
    let read = |ending: &str| {
        let path = dir.join(format!("{AUTHORITY}.{ending}"));
        std::fs::read_to_string(&path)
            .with_context(|| format!("{}: run tortie certs authority first", path.display()))
    };
    Ok(Issued { certificate: read("crt")?, key: read("key")?, number: None })
}

/// Writes a file that only its owner may read. The service and its clients read renewed files at once, so a file is complete
/// when it has its name.
fn write_file(path: &Path, text: &str, replace: bool) -> anyhow::Result<()> {
    let mut file = NamedTempFile::new_in(path.parent().context("it is no file")?)?;
    file.write_all(text.as_bytes())?;
    file.as_file().sync_all()?;
    match replace {
        true => drop(file.persist(path)?),
        false => drop(file.persist_noclobber(path).context("--renew replaces it")?),
    }
    Ok(())
}

/// Whether Kubernetes takes it as the name of a Node (RFC 1123, a DNS subdomain).
fn is_dns_name(name: &str) -> bool {
    let is_label = |label: &str| {
        let is_inner = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
        !label.is_empty() && !label.starts_with('-') && !label.ends_with('-') && label.bytes().all(is_inner)
    };
    name.len() <= 253 && name.split('.').all(is_label)
}

/// Whether a name can stand in logs, in a certificate (RFC 5280, ub-common-name) and in the name of a file.
fn is_name_for_logs(name: &str) -> bool {
    let is_inner = |c: u8| c.is_ascii_alphanumeric() || b"._-@".contains(&c);
    (1..=64).contains(&name.len())
        && name.bytes().all(is_inner)
        && name.starts_with(|first: char| first.is_ascii_alphanumeric())
}

/// A new authority.
fn authority(days: i64) -> anyhow::Result<Issued> {
    let mut params = valid_for(CertificateParams::new([])?, days)?;
    params.distinguished_name.push(DnType::CommonName, "tortie authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = KeyPair::generate()?;
    Ok(Issued { certificate: params.self_signed(&key)?.pem(), key: key.serialize_pem(), number: None })
}

fn issue(
    signer: &Issued,
    organisation: Option<&str>,
    common_name: &str,
    days: i64,
) -> anyhow::Result<Issued> {
    let issuer = issuer(signer)?;
    let names = if organisation.is_none() { vec![common_name.to_owned()] } else { Vec::new() };
    let mut params = valid_for(CertificateParams::new(names)?, days)?;
    params.distinguished_name.push(DnType::CommonName, common_name);
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![match organisation {
        None => ExtendedKeyUsagePurpose::ServerAuth,
        Some(organisation) => {
            params.distinguished_name.push(DnType::OrganizationName, organisation);
            ExtendedKeyUsagePurpose::ClientAuth
        }
    }];
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, &issuer)?.pem();
    let number = number(&CertificateId::of_pem(&certificate, &signer.certificate)?);
    Ok(Issued { certificate, key: key.serialize_pem(), number: Some(number) })
}

fn issuer(signer: &Issued) -> anyhow::Result<Issuer<'static, KeyPair>> {
    let key = KeyPair::from_pem(&signer.key).context("the key of the authority")?;
    Issuer::from_ca_cert_pem(&signer.certificate, key).context("the certificate of the authority")
}

/// A list (PEM) of revoked certificates. The service does not look at the date of the next one.
fn sign(list: &RevocationList, signer: &Issued, now: i64) -> anyhow::Result<String> {
    let seconds = |seconds: i64| u64::try_from(seconds).map(Duration::from_secs);
    let begin = rcgen::date_time_ymd(1970, 1, 1);
    let revoked = |(id, at): (&CertificateId, &i64)| {
        anyhow::Ok(RevokedCertParams {
            serial_number: SerialNumber::from_slice(id.serial()),
            revocation_time: begin + seconds(*at)?,
            reason_code: None,
            invalidity_date: None,
        })
    };
    let params = CertificateRevocationListParams {
        this_update: begin + seconds(now)?,
        next_update: begin + seconds(now)? + LIST_VALIDITY,
        crl_number: SerialNumber::from(u64::try_from(now)?),
        issuing_distribution_point: None,
        revoked_certs: list.0.iter().map(revoked).collect::<anyhow::Result<_>>()?,
        key_identifier_method: KeyIdMethod::Sha256,
    };
    Ok(params.signed_by(&issuer(signer)?)?.pem()?)
}

/// Valid from yesterday, because clocks differ, to the end of the last day.
fn valid_for(mut params: CertificateParams, days: i64) -> anyhow::Result<CertificateParams> {
    let today: Zoned = Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC);
    let day = |date: &Zoned| -> anyhow::Result<_> {
        let (month, day) = (u8::try_from(date.month())?, u8::try_from(date.day())?);
        Ok(rcgen::date_time_ymd(date.year().into(), month, day))
    };
    params.not_before = day(&today.checked_sub(1.day())?)?;
    params.not_after = day(&today.checked_add((days + 1).days())?)?;
    Ok(params)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_certificates_or_files_cannot_have_are_refused() {
        for (name, is_node, is_operator) in [
            ("one", true, true),
            ("ip-10-0-0-1.eu-west-1.compute.internal", true, true),
            ("One", false, true),
            ("ann@example.org", false, true),
            ("", false, false),
            ("a/b", false, false),
            ("..", false, false),
            ("-a", false, false),
            ("a-", false, true),
            ("a..b", false, true),
            ("a b", false, false),
            ("a\nb", false, false),
            ("ä", false, false),
        ] {
            assert_eq!((is_dns_name(name), is_name_for_logs(name)), (is_node, is_operator), "{name:?}");
        }
        let long = "a".repeat(65);
        assert_eq!((is_dns_name(&long), is_name_for_logs(&long)), (true, false));
        assert!(!is_dns_name(&"a.".repeat(127)) && !is_dns_name(&"a".repeat(254)));
    }
}
