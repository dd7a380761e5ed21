//! `tortie certs`: an authority for the embedded datastore, and the certificates of its service and clients.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Subcommand;
use jiff::{Timestamp, ToSpan, Zoned};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use tempfile::NamedTempFile;
use tortie_store::rpc::{controllers_subject, node_subject, operator_subject};

use crate::output;

/// The DNS name by which clients know the service.
const SERVICE: &str = "tortie-store";
/// The name of the authority's files.
const AUTHORITY: &str = "authority";

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
            Self::Node(Named { name, folder }) => {
                let (organisation, common_name) = node_subject(&name);
                folder.issue(&format!("node-{name}"), Some(organisation), &common_name)
            }
            Self::Controllers(folder) => {
                let (organisation, common_name) = controllers_subject();
                folder.issue("controllers", Some(organisation), &common_name)
            }
            Self::Operator(Named { name, folder }) => {
                let (organisation, common_name) = operator_subject(&name);
                folder.issue(&format!("operator-{name}"), Some(organisation), &common_name)
            }
        }
    }
}

impl Folder {
    /// Issues a certificate of the authority in the folder.
    fn issue(&self, file: &str, organisation: Option<&str>, common_name: &str) -> anyhow::Result<ExitCode> {
        if file.contains('/') || file.contains('\\') {
            bail!("{common_name:?} cannot be a part of a file's name");
        }
        let read = |ending: &str| {
            let path = self.dir.join(format!("{AUTHORITY}.{ending}"));
            std::fs::read_to_string(&path)
                .with_context(|| format!("{}: run tortie certs authority first", path.display()))
        };
        let signer = Issued { certificate: read("crt")?, key: read("key")? };
        let pair = issue(&signer, organisation, common_name, self.days.unwrap_or(365))?;
        self.write(file, &pair)
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
        for (ending, text) in [("key", &pair.key), ("crt", &pair.certificate)] {
            let path = self.dir.join(format!("{name}.{ending}"));
            self.write_file(&path, text).with_context(|| path.display().to_string())?;
            output::line(&path.display().to_string());
        }
        Ok(ExitCode::SUCCESS)
    }

    /// Writes a file that only its owner may read. The service and its clients read renewed files at once, so a file is complete
    /// when it has its name.
    fn write_file(&self, path: &Path, text: &str) -> anyhow::Result<()> {
        let mut file = NamedTempFile::new_in(&self.dir)?;
        file.write_all(text.as_bytes())?;
        file.as_file().sync_all()?;
        match self.renew {
            true => drop(file.persist(path)?),
            false => drop(file.persist_noclobber(path).context("--renew replaces it")?),
        }
        Ok(())
    }
}

/// A new authority.
fn authority(days: i64) -> anyhow::Result<Issued> {
    let mut params = valid_for(CertificateParams::new([])?, days)?;
    params.distinguished_name.push(DnType::CommonName, "tortie authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = KeyPair::generate()?;
    Ok(Issued { certificate: params.self_signed(&key)?.pem(), key: key.serialize_pem() })
}

fn issue(
    signer: &Issued,
    organisation: Option<&str>,
    common_name: &str,
    days: i64,
) -> anyhow::Result<Issued> {
    let signer_key = KeyPair::from_pem(&signer.key).context("the key of the authority")?;
    let issuer = Issuer::from_ca_cert_pem(&signer.certificate, signer_key)
        .context("the certificate of the authority")?;
    let names = if organisation.is_none() { vec![common_name.to_owned()] } else { Vec::new() };
    let mut params = valid_for(CertificateParams::new(names)?, days)?;
    params.distinguished_name.push(DnType::CommonName, common_name);
    if let Some(organisation) = organisation {
        params.distinguished_name.push(DnType::OrganizationName, organisation);
    }
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, &issuer)?;
    Ok(Issued { certificate: certificate.pem(), key: key.serialize_pem() })
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
