#!/bin/sh
# sharp 0.35.5: raw({depth: "ushort"}) of a gray PNG of 16 bits gives words with the upper
# 8 bits, three for each pixel, and png() writes 8 bits. toColourspace("grey16") before it
# keeps all 16. Seen: 30720 is 120, with grey16 30720.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet numpy==2.4.6 pillow==13.0.0
npm install --silent --no-audit --no-fund sharp@0.35.5
cat > case.py <<'PYTHON'
import numpy as np
from PIL import Image

Image.fromarray(np.full((8, 8), 30720, np.uint16)).save("gray.png")
PYTHON
venv/bin/python case.py
cat > case.cjs <<'JAVASCRIPT'
const sharp = require("sharp");

async function words(image) {
  const output = image.raw({ depth: "ushort" });
  const { data, info } = await output.toBuffer({ resolveWithObject: true });
  return [info.channels, data.readUInt16LE(0)];
}

(async () => {
  console.log("sharp", sharp.versions.sharp);
  const plain = await words(sharp("gray.png"));
  const gray = await words(sharp("gray.png").toColourspace("grey16"));
  const { depth } = await sharp(await sharp("gray.png").png().toBuffer()).metadata();
  console.log("channels and first word:", plain, "with grey16:", gray);
  console.log("depth of a PNG that is written:", depth);
  if (`${plain} ${gray} ${depth}` !== "3,120 1,30720 uchar") {
    throw new Error("this has changed");
  }
})();
JAVASCRIPT
node case.cjs
