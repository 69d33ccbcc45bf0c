//! Compresses the weights of the built-in model: as they are, they would be a third of the program.

use std::io::Write;
use std::path::Path;
use std::{env, fs, io};

use flate2::Compression;
use flate2::write::DeflateEncoder;

fn main() -> io::Result<()> {
    let assets = Path::new("../../assets/demo");
    println!("cargo::rerun-if-changed={}", assets.display());
    let out = env::var_os("OUT_DIR").expect("cargo sets it");
    for entry in fs::read_dir(assets)? {
        let part = entry?.path();
        for file in fs::read_dir(&part).into_iter().flatten() {
            let file = file?.path();
            if file.extension().is_some_and(|ending| ending == "safetensors") {
                let name = part.file_name().expect("it is a folder's entry");
                fs::write(Path::new(&out).join(name), deflate(&fs::read(file)?)?)?;
            }
        }
    }
    Ok(())
}

/// First all even bytes, then all odd ones: the upper bytes of 16-bit floats are alike, the lower ones are noise.
fn deflate(bytes: &[u8]) -> io::Result<Vec<u8>> {
    let plane = |first: usize| bytes.iter().copied().skip(first).step_by(2);
    let planes: Vec<u8> = plane(0).chain(plane(1)).collect();
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(&planes)?;
    encoder.finish()
}
