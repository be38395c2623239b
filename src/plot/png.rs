//! Renders an SVG to pixels by `resvg` with an embedded font, independent of the machine's fonts.

use std::sync::Arc;

use anyhow::Result;
use resvg::{tiny_skia, usvg};

use super::text::{FAMILY, failed};

/// Pixels of the PNG per pixel of the SVG.
pub const SCALE: u32 = 2;

/// Latin letters, digits and signs of DejaVu Sans (`font/LICENSE`).
const FONT: &[u8] = include_bytes!("font/DejaVuSans.ttf");

/// Renders an SVG as PNG.
///
/// # Errors
/// Text that is not an SVG.
pub fn encode(svg: &str) -> Result<Vec<u8>> {
    let mut fonts = usvg::fontdb::Database::new();
    fonts.load_font_data(FONT.to_vec());
    fonts.set_sans_serif_family(FAMILY);
    let options = usvg::Options { font_family: FAMILY.into(), fontdb: Arc::new(fonts), ..usvg::Options::default() };
    let tree = usvg::Tree::from_str(svg, &options).map_err(failed)?;
    let size = tree.size().to_int_size();
    let mut pixels = tiny_skia::Pixmap::new(size.width() * SCALE, size.height() * SCALE)
        .ok_or_else(|| failed("a picture without size"))?;
    let scale = tiny_skia::Transform::from_scale(SCALE as f32, SCALE as f32);
    resvg::render(&tree, scale, &mut pixels.as_mut());
    pixels.encode_png().map_err(failed)
}
