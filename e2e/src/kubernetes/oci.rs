//! Images as OCI archives, which replace a registry.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::cache::hex;

/// An image of a layer.
#[derive(Debug, Clone, Copy)]
pub struct Image<'a> {
    /// `registry/name:tag`.
    pub name: &'a str,
    /// The program that every container of it runs.
    pub entry_point: &'a [&'a str],
    /// Its arguments, or the program if there is no entry point, unless a container names others.
    pub command: &'a [&'a str],
}

/// The only layer of an image.
#[derive(Default)]
pub struct Layer(Tar);

impl Layer {
    /// Adds a file.
    #[must_use]
    pub fn file(mut self, path: &str, mode: u32, content: &[u8]) -> Self {
        self.0.add(path, mode, content);
        self
    }

    /// Adds an empty directory.
    #[must_use]
    pub fn directory(mut self, path: &str, mode: u32) -> Self {
        self.0.append(path, mode, b'5', "", &[]);
        self
    }

    /// Adds a symbolic link.
    #[must_use]
    pub fn link(mut self, path: &str, target: &str) -> Self {
        self.0.append(path, 0o777, b'2', target, &[]);
        self
    }
}

/// Writes an archive with an image of this name, with `/program` as its only content and entry point.
pub fn write_program(archive: &Path, image: &str, program: &str, content: &[u8]) -> Result<()> {
    let path = format!("/{program}");
    let image = Image { name: image, entry_point: &[&path], command: &[] };
    write(archive, &[image], Layer::default().file(program, 0o755, content))
}

/// Writes an archive with these images, all of them with this layer.
pub fn write(archive: &Path, images: &[Image<'_>], layer: Layer) -> Result<()> {
    let layer = layer.0.finish();
    let mut manifests: Vec<Value> = Vec::new();
    let mut blobs = Vec::new();
    for image in images {
        let config = serde_json::to_vec(&json!({
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": image.entry_point, "Cmd": image.command, "Env": ["PATH=/usr/bin:/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [digest(&layer)]},
        }))?;
        let manifest = serde_json::to_vec(&json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": digest(&config),
                "size": config.len(),
            },
            "layers": [{
                "mediaType": "application/vnd.oci.image.layer.v1.tar",
                "digest": digest(&layer),
                "size": layer.len(),
            }],
        }))?;
        let tag = image.name.rsplit_once(':').context("an image's name ends with a tag")?.1;
        manifests.push(json!({
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": digest(&manifest),
            "size": manifest.len(),
            "annotations": {"io.containerd.image.name": image.name, "org.opencontainers.image.ref.name": tag},
        }));
        blobs.extend([manifest, config]);
    }
    let index = serde_json::to_vec(&json!({"schemaVersion": 2, "manifests": manifests}))?;
    let mut out = Tar::default();
    out.add("oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#);
    out.add("index.json", 0o644, &index);
    for blob in blobs.iter().chain([&layer]) {
        out.add(&format!("blobs/sha256/{}", hex(&Sha256::digest(blob))), 0o644, blob);
    }
    std::fs::write(archive, out.finish()).with_context(|| format!("write {}", archive.display()))
}

fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex(&Sha256::digest(bytes)))
}

/// The program of every pod's sandbox. It pauses forever. An ELF executable for 64-bit x86, the only architecture of the
/// lab's guests: `again: mov $34, %eax (pause); syscall; jmp again`.
pub fn pause() -> Vec<u8> {
    const CODE: [u8; 9] = [0xb8, 34, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7];
    const BASE: u64 = 0x40_0000;
    const HEADERS: u64 = 64 + 56;
    let mut elf = Vec::new();
    // e_ident: 64-bit, little-endian, version 1
    elf.extend([0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    // e_type executable, e_machine x86-64, e_version
    elf.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    // e_entry, e_phoff, e_shoff
    for value in [BASE + HEADERS, 64, 0] {
        elf.extend(value.to_le_bytes());
    }
    elf.extend(0u32.to_le_bytes());
    // e_ehsize, e_phentsize, e_phnum, e_shentsize, e_shnum, e_shstrndx
    for value in [64u16, 56, 1, 64, 0, 0] {
        elf.extend(value.to_le_bytes());
    }
    // PT_LOAD, readable and executable: the whole file
    elf.extend(1u32.to_le_bytes());
    elf.extend(5u32.to_le_bytes());
    let size = HEADERS + CODE.len() as u64;
    for value in [0, BASE, BASE, size, size, 0x1000] {
        elf.extend(value.to_le_bytes());
    }
    elf.extend(CODE);
    elf
}

/// A tar archive in the ustar format.
#[derive(Default)]
pub(super) struct Tar(Vec<u8>);

impl Tar {
    pub(super) fn add(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.append(name, mode, b'0', "", content);
    }

    fn append(&mut self, name: &str, mode: u32, kind: u8, target: &str, content: &[u8]) {
        let mut header = [0u8; 512];
        let mut put = |at: usize, text: &[u8]| header[at..at + text.len()].copy_from_slice(text);
        assert!(name.len() < 100 && target.len() < 100, "names here are short");
        put(0, name.as_bytes());
        put(
            100,
            format!("{mode:07o}\0{:07o}\0{:07o}\0{:011o}\0{:011o}\0", 0, 0, content.len(), 0).as_bytes(),
        );
        // The checksum is computed with its own field filled with blanks.
        put(148, b"        ");
        put(156, &[kind]);
        put(157, target.as_bytes());
        put(257, b"ustar\x0000");
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.0.extend_from_slice(&header);
        self.0.extend_from_slice(content);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
    }

    pub(super) fn finish(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::process::{Command, Stdio};

    #[test]
    fn tar_extracts_the_oci_archive() {
        let folder = tempfile::tempdir().expect("a folder");
        let archive = folder.path().join("a.tar");
        write_program(&archive, "registry.example/a/b:1", "b", &[7; 1000]).expect("it is written");
        let output = Command::new("tar")
            .arg("-C")
            .arg(folder.path())
            .arg("-xf")
            .arg(&archive)
            .output()
            .expect("tar runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let read = |name: &str| std::fs::read(folder.path().join(name)).expect("it is in the archive");
        let index: Value = serde_json::from_slice(&read("index.json")).expect("JSON");
        let at = |digest: &Value| {
            let digest = digest.as_str().expect("a digest").to_owned();
            let blob = read(&format!("blobs/{}", digest.replace(':', "/")));
            assert_eq!(super::digest(&blob), digest);
            blob
        };
        let manifest: Value = serde_json::from_slice(&at(&index["manifests"][0]["digest"])).expect("JSON");
        let layer = at(&manifest["layers"][0]["digest"]);
        std::fs::write(&archive, layer).expect("written");
        let output =
            Command::new("tar").arg("-tvf").arg(&archive).env("LC_ALL", "C").output().expect("tar runs");
        let listed = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(listed.starts_with("-rwxr-xr-x") && listed.contains("1000"), "{listed}");
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn pause_runs_until_it_is_killed() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("pause");
        std::fs::write(&path, pause()).expect("written");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("executable");
        // Through a shell: a concurrent fork in another test could hold the file open for writing.
        let script = "until \"$0\"; do [ $? = 126 ] || exit; done";
        let mut child = Command::new("sh")
            .args(["-c", script])
            .arg(&path)
            .stdin(Stdio::null())
            .spawn()
            .expect("sh starts");
        let pauses = || -> Option<u32> {
            let children = format!("/proc/{0}/task/{0}/children", child.id());
            let pid: u32 = std::fs::read_to_string(children).ok()?.trim().parse().ok()?;
            let call = std::fs::read_to_string(format!("/proc/{pid}/syscall")).ok()?;
            call.starts_with("34 ").then_some(pid)
        };
        let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
        let pid = loop {
            if let Some(pid) = pauses() {
                break pid;
            }
            assert!(std::time::Instant::now() < until, "it does not pause");
            std::thread::yield_now();
        };
        let pid = rustix::process::Pid::from_raw(pid as i32).expect("a process");
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("killed");
        assert!(!child.wait().expect("it ends").success());
    }
}
