//! `tortie convert`: policies of manifests in another form.

use std::process::ExitCode;

use clap::ValueEnum;
use serde_json::{Value, json};
use tortie_api::manifest::{self, PolicyForm};
use tortie_api::to_yaml;

use crate::filenames::{Filenames, Manifest};
use crate::manifests::NOT_UNDERSTOOD;
use crate::output;

#[derive(clap::Args)]
#[command(mut_arg("files", |files| files.required_unless_present("kustomize")))]
pub(crate) struct Convert {
    #[command(flatten)]
    filenames: Filenames,
    /// The form of policies: Calico's (from Kubernetes'), or Kubernetes' (from Calico's)
    #[arg(long, value_enum, default_value_t = TargetForm::Calico)]
    to: TargetForm,
    /// Convert policies that lose something which may change verdicts, and name it
    #[arg(long)]
    allow_loss: bool,
    /// The output format
    #[arg(short, long, value_enum, default_value_t = ManifestFormat::Yaml)]
    output: ManifestFormat,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TargetForm {
    Calico,
    Kubernetes,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ManifestFormat {
    Yaml,
    Json,
}

impl Convert {
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let form = match self.to {
            TargetForm::Calico => PolicyForm::Calico,
            TargetForm::Kubernetes => PolicyForm::Kubernetes,
        };
        let (mut objects, mut problems, mut notes) = (Vec::new(), Vec::new(), Vec::new());
        for Manifest { name, text } in self.filenames.manifests()? {
            match manifest::convert(&name, &text?, form) {
                Ok(converted) => {
                    objects.extend(converted.objects);
                    let losses = if self.allow_loss { &mut notes } else { &mut problems };
                    losses.extend(converted.losses);
                    notes.extend(converted.notes);
                }
                Err(more) => problems.extend(more),
            }
        }
        for problem in &problems {
            output::error_line(&problem.to_string());
        }
        if !problems.is_empty() {
            let count = output::count(problems.len() as u64, "problem");
            output::error(&format!("{count}; nothing was converted"));
            return Ok(ExitCode::from(NOT_UNDERSTOOD));
        }
        for note in notes {
            output::error_line(&format!("note: {note}"));
        }
        self.print(&objects)?;
        Ok(ExitCode::SUCCESS)
    }

    fn print(&self, objects: &[Value]) -> anyhow::Result<()> {
        match (self.output, objects) {
            (ManifestFormat::Yaml, objects) => {
                let documents: Vec<String> = objects.iter().map(to_yaml).collect();
                output::text(&documents.join("---\n"));
            }
            (ManifestFormat::Json, [one]) => output::line(&serde_json::to_string_pretty(one)?),
            (ManifestFormat::Json, all) => {
                let list = json!({"apiVersion": "v1", "kind": "List", "items": all});
                output::line(&serde_json::to_string_pretty(&list)?);
            }
        }
        Ok(())
    }
}
