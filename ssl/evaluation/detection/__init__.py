"""Detection: Mask R-CNN on a backbone's pyramid, learned and judged on COCO-style instances."""
